"""What one token of a clip sees, and why: for pictures and explanations. No tensors here."""

from dataclasses import dataclass
from enum import Enum
from itertools import product

from attention.pattern import AnchorLocalPattern
from attention.tiles import Grid, TilePattern
from attention.window_sink.window import Window

Position = tuple[int, int, int]  # frame, row, column


class Sight(Enum):
    """How a token is seen by the one in question."""

    UNSEEN = "."
    LOCAL = "#"
    ANCHOR = "o"  # or a global frame of a window: all tokens see it
    ITSELF = "@"


@dataclass(frozen=True, slots=True)
class View:
    """What a token sees.

    Attributes:
        sights: of all tokens, in raster order.
        allowed_pairs: (query, key) pairs of the whole clip that attend.
    """

    grid: Grid
    sights: tuple[Sight, ...]
    allowed_pairs: int

    @property
    def density(self) -> float:
        """Allowed pairs over tokens squared."""
        return self.allowed_pairs / len(self.sights) ** 2

    @property
    def seen(self) -> int:
        """Number of tokens that the token sees, itself included."""
        return len(self.sights) - self.sights.count(Sight.UNSEEN)


def view(rule: AnchorLocalPattern | TilePattern | Window, grid: Grid, token: Position) -> View:
    """What the token at (frame, row, column) sees.

    Raises:
        ValueError: the clip has no such token.
    """
    if not all(0 <= at < side for at, side in zip(token, grid, strict=True)):
        sides = " x ".join(map(str, grid))
        raise ValueError(f"token must lie in a clip of {sides} tokens, counted from 0, got {token}")
    frames, rows, columns = map(range, grid)
    sights = tuple(
        Sight.ITSELF if other == token else _sight(rule, grid, token, other)
        for other in product(frames, rows, columns)
    )
    tokens = len(sights)
    pairs = rule.allowed_pairs(grid) if isinstance(rule, TilePattern) else rule.allowed_pairs(tokens)
    return View(grid, sights, pairs)


def _sight(
    rule: AnchorLocalPattern | TilePattern | Window, grid: Grid, token: Position, other: Position
) -> Sight:
    if isinstance(rule, TilePattern):
        q_anchor, k_anchor, near = rule.is_anchor(token), rule.is_anchor(other), rule.same_box(token, other)
    elif isinstance(rule, AnchorLocalPattern):
        q, k = _index(grid, token), _index(grid, other)
        q_anchor, k_anchor = (i % rule.anchor_stride == rule.anchor_offset for i in (q, k))
        near = q // rule.block_size == k // rule.block_size
    else:
        q, k = _index(grid, token), _index(grid, other)
        bounds = rule.within(grid[0] * grid[1] * grid[2])
        q_anchor, k_anchor = q < bounds.global_queries, k < bounds.global_keys
        near = -bounds.left <= k // bounds.unit - q // bounds.unit <= bounds.right
    if k_anchor:
        return Sight.ANCHOR
    return Sight.LOCAL if near or q_anchor else Sight.UNSEEN


def _index(grid: Grid, position: Position) -> int:
    frame, row, column = position
    return (frame * grid[1] + row) * grid[2] + column
