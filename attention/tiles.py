"""The tile order in integers: boxes of a clip's tokens, anchors spread over all three axes. No tensors here.

Tokens of a clip have coordinates (frame, row, column). A query q and a key k may attend iff

    they lie in one box: q // tile_thw == k // tile_thw, on each of the three axes
    or q is an anchor, or k is one

where a token is an anchor iff ``(column + row_step * row + frame_step * frame) % anchor_stride`` is
``anchor_offset``. The two steps follow from the stride: those that keep the anchors furthest apart. So
exactly one of ``anchor_stride`` offsets makes a given token an anchor, and no stride aliases with a side of
the clip.
Boxes begin at multiples of their sides; the last one on an axis may be cut short.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

Grid = tuple[int, int, int]  # latent frames, rows, columns
AXES = ("time", "height", "width")
MAX_STRIDE = 1024  # finding the steps takes time that grows faster than the stride


@dataclass(frozen=True, slots=True)
class TilePattern:
    """Sides of a box in tokens (time, height, width), anchor stride and offset.

    Raises:
        ValueError: a value is out of range.
    """

    tile_thw: Grid
    anchor_stride: int
    anchor_offset: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tile_thw", tuple(self.tile_thw))  # a list, as JSON has it, has no hash
        if len(self.tile_thw) != 3 or min(self.tile_thw) < 1:
            raise ValueError(f"tile_thw must be three sides of at least 1 token, got {self.tile_thw}")
        if not 1 <= self.anchor_stride <= MAX_STRIDE:
            raise ValueError(
                f"anchor_stride must lie in 1 .. {MAX_STRIDE} for tiles, got {self.anchor_stride}"
            )
        if not 0 <= self.anchor_offset < self.anchor_stride:
            raise ValueError(
                f"anchor_offset must lie in [0, anchor_stride={self.anchor_stride}), got {self.anchor_offset}"
            )

    @property
    def steps(self) -> tuple[int, int]:
        """(frame_step, row_step) of the anchors."""
        return lattice_steps(self.anchor_stride)

    def is_anchor(self, position: tuple[int, int, int]) -> bool:
        """Whether the token at (frame, row, column) is an anchor."""
        frame, row, column = position
        frame_step, row_step = self.steps
        return (column + row_step * row + frame_step * frame) % self.anchor_stride == self.anchor_offset

    def same_box(self, one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
        """Whether two tokens lie in one box."""
        return all(a // tile == b // tile for a, b, tile in zip(one, other, self.tile_thw, strict=True))

    def is_full(self, grid: Grid) -> bool:
        """Whether every pair is allowed: one box, or every token an anchor."""
        one_box = all(tile >= side for tile, side in zip(self.tile_thw, grid, strict=True))
        return one_box or self.anchor_stride == 1

    def boxes(self, grid: Grid) -> Iterator[tuple[range, range, range]]:
        """Coordinates of the boxes, in the order time, height, width."""
        axes = [
            [range(begin, min(begin + tile, side)) for begin in range(0, side, tile)]
            for tile, side in zip(self.tile_thw, grid, strict=True)
        ]
        yield from product(*axes)

    def allowed_pairs(self, grid: Grid) -> int:
        """Number of (query, key) pairs that attend.

        An anchor query sees all tokens; any other one sees the anchors and its box's other non-anchors.
        """
        if min(grid) < 1:
            raise ValueError(f"grid must be three sides of at least 1 token, got {grid}")
        return _allowed_pairs(self, grid)

    def anchors_in(self, frames: range, rows: range, columns: range) -> int:
        """Number of anchors in a box."""
        frame_step, row_step = self.steps
        stride = self.anchor_stride
        found = 0
        for frame, row in product(frames, rows):
            first = (self.anchor_offset - row_step * row - frame_step * frame) % stride
            found += _of_residue(columns.stop, first, stride) - _of_residue(columns.start, first, stride)
        return found


def _of_residue(stop: int, residue: int, stride: int) -> int:
    """Numbers below stop that leave this residue."""
    return (max(stop - residue, 0) + stride - 1) // stride


@lru_cache(maxsize=64)  # a model asks at every layer and step
def _allowed_pairs(pattern: TilePattern, grid: Grid) -> int:
    tokens = grid[0] * grid[1] * grid[2]
    if pattern.is_full(grid):
        return tokens * tokens
    boxes = [
        (len(frames) * len(rows) * len(columns), pattern.anchors_in(frames, rows, columns))
        for frames, rows, columns in pattern.boxes(grid)
    ]
    anchors = sum(inside for _, inside in boxes)
    others = sum((size - inside) * (anchors + size - inside) for size, inside in boxes)
    return anchors * tokens + others


@lru_cache(maxsize=64)
def lattice_steps(stride: int) -> tuple[int, int]:
    """(frame_step, row_step): the pair (g * g, g) modulo the stride whose anchors lie furthest apart.

    Distance is Euclidean in tokens; of equal ones the smallest g.
    """
    best, found = 0, (0, 0)
    for row_step in range(stride):
        frame_step = row_step * row_step % stride
        nearest = _nearest(frame_step, row_step, stride, stop_at=best)
        if nearest > best:
            best, found = nearest, (frame_step, row_step)
    return found


def _nearest(frame_step: int, row_step: int, stride: int, stop_at: int) -> int:
    """Squared distance of the two nearest anchors, or something no larger than stop_at."""
    # Along a row they are one stride apart; no lattice of this density has a longer shortest vector than
    # (sqrt(2) * stride) ** (1/3).
    nearest = stride * stride
    reach = int((1.42 * stride) ** (1 / 3)) + 1
    for frame in range(reach + 1):
        for row in range(-reach if frame else 1, reach + 1):
            column = -(frame_step * frame + row_step * row) % stride
            column = min(column, stride - column)
            nearest = min(nearest, frame * frame + row * row + column * column)
            if nearest <= stop_at:
                return nearest
    return nearest


def tile_density(grid: Grid, tile_thw: Grid, anchor_stride: int, anchor_offset: int = 0) -> float:
    """Allowed pairs over tokens squared, counted in integers and divided once.

    Raises:
        ValueError: a value is out of range.
    """
    pairs = TilePattern(tile_thw, anchor_stride, anchor_offset).allowed_pairs(grid)
    return pairs / (grid[0] * grid[1] * grid[2]) ** 2
