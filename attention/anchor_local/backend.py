"""anchor_local as a backend: all layers run on anchors-first order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.anchor_local.api import anchor_local_ordered
from attention.backends import BackendSettings, TokenGrid, TokenOrder
from attention.choice import Impl, check_impl, resolve_impl
from attention.layout import anchor_local_layout
from attention.pattern import AnchorLocalPattern


@dataclass(frozen=True, slots=True)
class AnchorLocalBackend:
    """A pattern in tokens.

    Raises:
        ValueError: an implementation that knows no order but the caller's.
    """

    pattern: AnchorLocalPattern
    impl: Impl = "auto"

    name = "anchor_local"
    differs_by_layer = False
    why_never_dense = None

    def __post_init__(self) -> None:
        check_impl(self.impl)
        if self.impl == "reference":
            raise ValueError(
                "impl='reference' cannot be swapped in: it is defined on the caller's token order"
            )

    @property
    def settings(self) -> BackendSettings:
        """The pattern."""
        pattern = self.pattern
        return BackendSettings(
            block_size=pattern.block_size,
            anchor_stride=pattern.anchor_stride,
            anchor_offset=pattern.anchor_offset,
        )

    def check(self, layers: int, heads: int) -> None:
        """Any transformer will do."""

    def plan(self, grid: TokenGrid) -> "AnchorLocalPlan":
        """The pattern over so many tokens."""
        return AnchorLocalPlan(self.pattern, grid.tokens, self.impl)


@dataclass(frozen=True, slots=True)
class AnchorLocalPlan:
    """The pattern over a clip."""

    pattern: AnchorLocalPattern
    tokens: int
    impl: Impl

    @property
    def allowed_pairs(self) -> int:
        """(query, key) pairs that attend."""
        return self.pattern.allowed_pairs(self.tokens)

    def order(self, device: torch.device) -> TokenOrder:
        """Anchors first."""
        layout = anchor_local_layout(self.pattern, self.tokens, device)
        return TokenOrder(layout.key_order, layout.query_inverse)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int) -> Tensor:
        """[batch, tokens, heads, head_dim] in that order."""
        layout = anchor_local_layout(self.pattern, self.tokens, q.device)
        return anchor_local_ordered(q, k, v, layout, scale=scale, impl=self.impl)

    def implementation(self, q: Tensor) -> str:
        """torch or triton."""
        return resolve_impl(self.impl, q)
