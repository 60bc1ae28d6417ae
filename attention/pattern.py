"""The anchor+local pattern in integers: who may attend to whom, and how many pairs that is. No tensors here.

A query q and a key k of n tokens may attend iff

    q // block_size == k // block_size
    or q % anchor_stride == anchor_offset
    or k % anchor_stride == anchor_offset
"""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class AnchorLocalPattern:
    """Block size, anchor stride and anchor offset, in tokens of the caller's order.

    Raises:
        ValueError: a value is out of range.
    """

    block_size: int
    anchor_stride: int
    anchor_offset: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "anchor_stride"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.anchor_offset < self.anchor_stride:
            raise ValueError(
                f"anchor_offset must lie in [0, anchor_stride={self.anchor_stride}), got {self.anchor_offset}"
            )

    def is_full(self, tokens: int) -> bool:
        """Whether every pair of ``tokens`` tokens is allowed: one block, or every token an anchor."""
        return self.block_size >= tokens or self.anchor_stride == 1

    def anchors_before(self, position: int) -> int:
        """Number of anchors among tokens ``0 .. position - 1``."""
        return (max(position - self.anchor_offset, 0) + self.anchor_stride - 1) // self.anchor_stride

    def allowed_pairs(self, tokens: int) -> int:
        """Number of (query, key) pairs that attend.

        An anchor query sees all tokens; any other one sees the anchors and its block's other non-anchors.
        """
        if tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {tokens}")
        return _allowed_pairs(self, tokens)


@lru_cache(maxsize=64)  # a model asks at every layer and step
def _allowed_pairs(pattern: AnchorLocalPattern, tokens: int) -> int:
    if pattern.is_full(tokens):
        return tokens * tokens
    anchors = pattern.anchors_before(tokens)
    pairs = anchors * tokens
    for begin in range(0, tokens, pattern.block_size):
        end = min(begin + pattern.block_size, tokens)
        local = end - begin - (pattern.anchors_before(end) - pattern.anchors_before(begin))
        pairs += local * (anchors + local)
    return pairs


def density(n: int, block_size: int, anchor_stride: int, anchor_offset: int = 0) -> float:
    """Allowed pairs over n squared, counted in integers and divided once.

    Raises:
        ValueError: n, block_size or anchor_stride below 1, or anchor_offset outside the stride.
    """
    return AnchorLocalPattern(block_size, anchor_stride, anchor_offset).allowed_pairs(n) / (n * n)
