"""Boxes of a clip in integers: how many tokens each has, which touch each other, how many are kept.

Knows: token grids. Does not know: tensors (the API process reads this), or which boxes a query keeps.

A box is a run of ``block_size`` tokens in raster order, or has the sides ``tile_thw``; anchors do not count
to it. Boxes touch if they are one step apart on one axis of the grid of boxes: at most 2 for runs, 6 for
sides. Boxes that hold nothing but anchors are left out.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from attention.pattern import AnchorLocalPattern
from attention.tiles import Grid, TilePattern

# Scores of all pairs of boxes are made, for each head: 0.7 GB in float32 with 40 heads.
MAX_BOXES = 2048


@dataclass(frozen=True, slots=True)
class BoxPattern:
    """What is a box, and which tokens are anchors.

    Attributes:
        tile_thw: sides of a box: time, height, width; boxes at the far edges may be cut short.
        block_size: or the length of a run in raster order.
        anchor_stride, anchor_offset: anchors as of ``AnchorLocalPattern`` or ``TilePattern``; None: there are
            none.

    Raises:
        ValueError: a value is out of range, or not exactly one of tile_thw and block_size is given.
    """

    tile_thw: Grid | None = None
    block_size: int | None = None
    anchor_stride: int | None = None
    anchor_offset: int = 0

    def __post_init__(self) -> None:
        if (self.tile_thw is None) == (self.block_size is None):
            raise ValueError(
                f"boxes need tile_thw or block_size, one of them; got {self.tile_thw} and {self.block_size}"
            )
        if self.tile_thw is not None:
            object.__setattr__(self, "tile_thw", tuple(self.tile_thw))
        if self.anchor_stride is None and self.anchor_offset:
            raise ValueError(f"anchor_offset={self.anchor_offset} without an anchor_stride has no effect")
        self.pattern  # noqa: B018 - checks the values

    @property
    def pattern(self) -> AnchorLocalPattern | TilePattern:
        """Boxes and anchors; where there are no anchors, its stride means nothing."""
        stride = 1 if self.anchor_stride is None else self.anchor_stride
        if self.tile_thw is not None:
            return TilePattern(self.tile_thw, stride, self.anchor_offset)
        return AnchorLocalPattern(self.block_size or 0, stride, self.anchor_offset)

    def boxes(self, grid: Grid) -> "Boxes":
        """The boxes of a clip.

        Raises:
            ValueError: there are more than MAX_BOXES.
        """
        if min(grid) < 1:
            raise ValueError(f"grid must be three sides of at least 1 token, got {grid}")
        return _boxes(self, grid)


@dataclass(frozen=True, slots=True)
class Boxes:
    """Boxes of a clip, in the order of their numbers; of those on a grid: time, height, width.

    Attributes:
        lengths: tokens of each box, its anchors left out; none is empty.
        neighbours: numbers of the boxes that touch it, of each box.
        anchors: tokens that are anchors.
    """

    lengths: tuple[int, ...]
    neighbours: tuple[tuple[int, ...], ...]
    anchors: int

    def kept(self, top_k: float) -> tuple[int, ...]:
        """How many boxes each box keeps: top_k, but never fewer than itself and its neighbours."""
        most = kept_boxes(top_k, len(self.lengths))
        return tuple(max(most, 1 + len(touching)) for touching in self.neighbours)

    def expected_pairs(self, top_k: float) -> float:
        """(query, key) pairs of a head that attend, if boxes are chosen at random.

        Exact where all boxes have one length, and where all are kept.
        """
        others = sum(self.lengths)
        pairs = float(self.anchors * (self.anchors + others))
        for length, touching, kept in zip(self.lengths, self.neighbours, self.kept(top_k), strict=True):
            always = length + sum(self.lengths[box] for box in touching)
            choices = len(self.lengths) - 1 - len(touching)
            chosen = (others - always) * (kept - 1 - len(touching)) / max(choices, 1)
            pairs += length * (self.anchors + always + chosen)
        return pairs


def check_top_k(top_k: float) -> None:
    """Raise ValueError unless it is a share between 0 and 1 or a whole number of boxes."""
    if not (top_k > 0 and math.isfinite(top_k) and (top_k < 1 or top_k == int(top_k))):
        raise ValueError(
            f"top_k must be a share of the boxes, above 0 and below 1, or a whole number of them, got {top_k}"
        )


def kept_boxes(top_k: float, boxes: int) -> int:
    """How many of so many boxes top_k means; a share is rounded up.

    Raises:
        ValueError: it is neither a share nor a count.
    """
    check_top_k(top_k)
    # 0.07 * 100 is a little more than 7.
    return min(math.ceil(top_k * boxes - 1e-9) if top_k < 1 else int(top_k), boxes)


@lru_cache(maxsize=64)  # a model asks at every layer and step
def _boxes(boxes: BoxPattern, grid: Grid) -> Boxes:
    pattern = boxes.pattern
    anchored = boxes.anchor_stride is not None
    tokens = grid[0] * grid[1] * grid[2]
    if isinstance(pattern, TilePattern):
        counts = [-(-side // tile) for side, tile in zip(grid, pattern.tile_thw, strict=True)]
    else:
        counts = [-(-tokens // pattern.block_size), 1, 1]
    if math.prod(counts) > MAX_BOXES:
        name, value = ("tile_thw", boxes.tile_thw) if boxes.tile_thw else ("block_size", boxes.block_size)
        raise ValueError(
            f"{name}={value} cuts {tokens} tokens into {math.prod(counts)} boxes; at most {MAX_BOXES} "
            "are possible, so make it larger"
        )
    if isinstance(pattern, TilePattern):
        sizes = [len(t) * len(h) * len(w) for t, h, w in pattern.boxes(grid)]
        inside = [pattern.anchors_in(*sides) if anchored else 0 for sides in pattern.boxes(grid)]
    else:
        begins = range(0, tokens, pattern.block_size)
        ends = [min(begin + pattern.block_size, tokens) for begin in begins]
        sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
        inside = [
            pattern.anchors_before(end) - pattern.anchors_before(begin) if anchored else 0
            for begin, end in zip(begins, ends, strict=True)
        ]
    places = [(t, h, w) for t, h, w in product(*map(range, counts))]
    full = [i for i, (size, anchors) in enumerate(zip(sizes, inside, strict=True)) if size > anchors]
    numbers = {places[i]: number for number, i in enumerate(full)}
    return Boxes(
        lengths=tuple(sizes[i] - inside[i] for i in full),
        neighbours=tuple(_touching(places[i], numbers) for i in full),
        anchors=sum(inside),
    )


def _touching(place: Grid, numbers: dict[Grid, int]) -> tuple[int, ...]:
    t, h, w = place
    near = ((t - 1, h, w), (t + 1, h, w), (t, h - 1, w), (t, h + 1, w), (t, h, w - 1), (t, h, w + 1))
    return tuple(sorted(numbers[other] for other in near if other in numbers))
