"""What one token of a clip sees, and why: for pictures and explanations. No tensors here."""

from dataclasses import dataclass
from enum import Enum
from itertools import product

from attention.block_topk.boxes import BoxPattern
from attention.pattern import AnchorLocalPattern
from attention.tiles import Grid, TilePattern
from attention.window_sink.window import Window

Position = tuple[int, int, int]  # frame, row, column


class Sight(Enum):
    """How a token is seen by the one in question."""

    UNSEEN = "."
    CHOSEN = "?"  # if its box is one of those that the content chooses
    LOCAL = "#"
    ANCHOR = "o"  # or a global frame of a window: all tokens see it
    ITSELF = "@"


@dataclass(frozen=True, slots=True)
class View:
    """What a token sees.

    Attributes:
        sights: of all tokens, in raster order.
        allowed_pairs: (query, key) pairs of the whole clip that attend; where the content chooses, as many as
            are expected.
    """

    grid: Grid
    sights: tuple[Sight, ...]
    allowed_pairs: float

    @property
    def density(self) -> float:
        """Allowed pairs over tokens squared."""
        return self.allowed_pairs / len(self.sights) ** 2

    @property
    def seen(self) -> int:
        """Number of tokens that the token sees whatever the content, itself included."""
        return len(self.sights) - self.sights.count(Sight.UNSEEN) - self.sights.count(Sight.CHOSEN)


@dataclass(frozen=True, slots=True)
class ChoosingBoxes:
    """block_topk: boxes that keep themselves, those that touch them, and some more by their content."""

    pattern: BoxPattern
    top_k: float


Rule = AnchorLocalPattern | TilePattern | Window | ChoosingBoxes


def view(rule: Rule, grid: Grid, token: Position) -> View:
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
    return View(grid, sights, _pairs(rule, grid, tokens))


def _pairs(rule: Rule, grid: Grid, tokens: int) -> float:
    if isinstance(rule, ChoosingBoxes):
        return rule.pattern.boxes(grid).expected_pairs(rule.top_k)
    return rule.allowed_pairs(grid) if isinstance(rule, TilePattern) else rule.allowed_pairs(tokens)


def _sight(rule: Rule, grid: Grid, token: Position, other: Position) -> Sight:
    if isinstance(rule, ChoosingBoxes):
        return _box_sight(rule.pattern, grid, token, other)
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


def _box_sight(boxes: BoxPattern, grid: Grid, token: Position, other: Position) -> Sight:
    def is_anchor(position: Position) -> bool:
        if boxes.anchor_stride is None:
            return False
        if isinstance(boxes.pattern, TilePattern):
            return boxes.pattern.is_anchor(position)
        return _index(grid, position) % boxes.anchor_stride == boxes.anchor_offset

    def place(position: Position) -> Position:
        if boxes.tile_thw is None:
            return _index(grid, position) // (boxes.block_size or 1), 0, 0
        frame, row, column = (at // side for at, side in zip(position, boxes.tile_thw, strict=True))
        return frame, row, column

    if is_anchor(other):
        return Sight.ANCHOR
    steps = sum(abs(a - b) for a, b in zip(place(token), place(other), strict=True))
    return Sight.LOCAL if is_anchor(token) or steps <= 1 else Sight.CHOSEN


def _index(grid: Grid, position: Position) -> int:
    frame, row, column = position
    return (frame * grid[1] + row) * grid[2] + column
