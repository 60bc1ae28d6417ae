"""Token order and key ranges: which tokens are anchors, and which segment every other token is in.

Knows nothing of kernels or models. A layout puts all anchors first and then each block's other tokens::

    [ anchors | block 0 without anchors | block 1 without anchors | ... ]

so that any query needs two contiguous key ranges, the anchors and its own segment, whatever the pattern was.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attention.pattern import AnchorLocalPattern
from attention.tiles import Grid, TilePattern

Pattern = AnchorLocalPattern | TilePattern


@dataclass(frozen=True, eq=False)
class AnchorLocalLayout:
    """Anchors-first order of ``tokens`` keys and of a chunk of ``queries`` queries.

    Attributes:
        tokens: number of keys.
        anchors: number of anchor keys; they are ordered keys ``0 .. anchors - 1``.
        key_order: int64 [tokens], on the device; ``key_order[i]`` is the caller's position of ordered key i.
        query_order: int64 [queries], the same for the queries, counted from the chunk's own first row.
        query_inverse: int64 [queries], the caller's row r is ordered row ``query_inverse[r]``.
        anchor_queries: ordered query rows below this see all keys.
        runs: int64 [runs, 4] on the CPU: (begin, end, key_begin, key_end); ordered queries begin .. end - 1
            see keys ``0 .. anchors - 1`` and ``key_begin .. key_end - 1``. No run is empty.
    """

    tokens: int
    anchors: int
    key_order: Tensor
    query_order: Tensor
    query_inverse: Tensor
    anchor_queries: int
    runs: Tensor

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.query_order.numel()


@lru_cache(maxsize=64)
def anchor_local_layout(
    pattern: AnchorLocalPattern,
    tokens: int,
    device: torch.device,
    q_start: int = 0,
    queries: int | None = None,
) -> AnchorLocalLayout:
    """Layout of the pattern over ``tokens`` keys, for the queries at ``q_start .. q_start + queries - 1``.

    ``queries=None`` means all tokens from ``q_start``. Layouts are cached: a model asks for the same one at
    every layer and step.
    """
    queries = tokens - q_start if queries is None else queries
    if not (q_start >= 0 and queries >= 1 and q_start + queries <= tokens):
        raise ValueError(f"queries {q_start} .. {q_start + queries - 1} do not lie within {tokens} tokens")
    if pattern.is_full(tokens):
        return _full_layout(tokens, queries, q_start, device)
    key_order = _anchors_first(pattern, 0, tokens)
    query_order = _anchors_first(pattern, q_start, queries)
    anchor_queries = pattern.anchors_before(q_start + queries) - pattern.anchors_before(q_start)
    return AnchorLocalLayout(
        tokens=tokens,
        anchors=pattern.anchors_before(tokens),
        key_order=key_order.to(device),
        query_order=query_order.to(device),
        query_inverse=_inverse(query_order).to(device),
        anchor_queries=anchor_queries,
        runs=_runs(pattern, tokens, q_start, queries, anchor_queries),
    )


@lru_cache(maxsize=64)
def clip_layout(pattern: Pattern, grid: Grid, device: torch.device, text: int = 0) -> AnchorLocalLayout:
    """Layout of ``text`` tokens, all of them anchors, and behind them a clip of frames x rows x columns."""
    if text:
        return _behind_anchors(clip_layout(pattern, grid, device), text)
    if isinstance(pattern, AnchorLocalPattern):
        return anchor_local_layout(pattern, grid[0] * grid[1] * grid[2], device)
    return _tile_layout(pattern, grid, device)


def _behind_anchors(layout: AnchorLocalLayout, count: int) -> AnchorLocalLayout:
    """The same layout behind so many more anchors."""
    first = torch.arange(count, device=layout.key_order.device)
    order = torch.cat([first, layout.key_order + count])
    return AnchorLocalLayout(
        tokens=layout.tokens + count,
        anchors=layout.anchors + count,
        key_order=order,
        query_order=order,
        query_inverse=torch.cat([first, layout.query_inverse + count]),
        anchor_queries=layout.anchor_queries + count,
        runs=layout.runs + count,
    )


def tile_anchors(pattern: TilePattern, grid: Grid) -> Tensor:
    """Boolean [tokens], raster order: is the token an anchor?"""
    frame, row, column = _coordinates(grid)
    frame_step, row_step = pattern.steps
    residue = (column + row_step * row + frame_step * frame) % pattern.anchor_stride
    return residue == pattern.anchor_offset


def tile_boxes(pattern: TilePattern, grid: Grid) -> Tensor:
    """int64 [tokens], raster order: number of the token's box."""
    number = torch.zeros(grid[0] * grid[1] * grid[2], dtype=torch.int64)
    for position, tile, side in zip(_coordinates(grid), pattern.tile_thw, grid, strict=True):
        number = number * -(-side // tile) + position // tile
    return number


def _coordinates(grid: Grid) -> list[Tensor]:
    axes = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
    return [axis.flatten() for axis in axes]


def _tile_layout(pattern: TilePattern, grid: Grid, device: torch.device) -> AnchorLocalLayout:
    tokens = grid[0] * grid[1] * grid[2]
    if pattern.is_full(grid):
        return _full_layout(tokens, tokens, 0, device)
    is_anchor, box = tile_anchors(pattern, grid), tile_boxes(pattern, grid)
    order = box.masked_fill(is_anchor, -1).argsort(stable=True)
    anchors = int(is_anchor.sum())
    others = box[~is_anchor].bincount()  # of each box
    ends = anchors + others[others > 0].cumsum(0)
    begins = torch.cat([torch.tensor([anchors]), ends[:-1]])
    return AnchorLocalLayout(
        tokens=tokens,
        anchors=anchors,
        key_order=order.to(device),
        query_order=order.to(device),
        query_inverse=_inverse(order).to(device),
        anchor_queries=anchors,
        runs=torch.stack([begins, ends, begins, ends], dim=1),
    )


@lru_cache(maxsize=64)
def frames_layout(
    window: tuple[int | None, int | None], global_frames: int, grid: Grid, device: torch.device, text: int
) -> AnchorLocalLayout:
    """Layout of text and a clip in raster order whose tokens see the frames about their own.

    A token sees the text, the first ``global_frames`` frames and those within ``window`` (left, right; None
    is unbounded); a text token sees all. Nothing is moved.
    """
    frames, frame = grid[0], grid[1] * grid[2]
    anchors = text + min(global_frames, frames) * frame
    left, right = (frames if side is None else side for side in window)
    own = torch.arange(frames)
    begins = text + own * frame
    keys = torch.stack([text + (own - left) * frame, text + (own + right + 1) * frame], dim=1)
    keys = keys.clamp(min=anchors, max=text + frames * frame)
    order = torch.arange(text + frames * frame, device=device)
    return AnchorLocalLayout(
        tokens=order.numel(),
        anchors=anchors,
        key_order=order,
        query_order=order,
        query_inverse=order,
        anchor_queries=text,
        runs=torch.cat([begins[:, None], begins[:, None] + frame, keys], dim=1),
    )


def _full_layout(tokens: int, queries: int, q_start: int, device: torch.device) -> AnchorLocalLayout:
    """Every token an anchor: nothing is moved and no segment is left."""
    rows = torch.arange(queries, device=device)
    return AnchorLocalLayout(
        tokens=tokens,
        anchors=tokens,
        key_order=torch.arange(tokens, device=device),
        query_order=rows,
        query_inverse=rows,
        anchor_queries=queries,
        runs=torch.empty(0, 4, dtype=torch.int64),
    )


def _anchors_first(pattern: AnchorLocalPattern, start: int, count: int) -> Tensor:
    positions = torch.arange(start, start + count)
    is_anchor = positions % pattern.anchor_stride == pattern.anchor_offset
    return torch.cat([positions[is_anchor], positions[~is_anchor]]) - start


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return inverse


def _runs(
    pattern: AnchorLocalPattern, tokens: int, q_start: int, queries: int, anchor_queries: int
) -> Tensor:
    """One run for each block that has non-anchor queries in the chunk."""
    q_end = q_start + queries
    first_block = q_start // pattern.block_size
    begins = torch.arange(first_block * pattern.block_size, q_end, pattern.block_size)
    ends = (begins + pattern.block_size).clamp(max=tokens)

    def others_before(position: Tensor) -> Tensor:
        """Non-anchors among tokens 0 .. position - 1."""
        stride, offset = pattern.anchor_stride, pattern.anchor_offset
        return position - ((position - offset).clamp(min=0) + stride - 1) // stride

    anchors = pattern.anchors_before(tokens)
    before_chunk = q_start - pattern.anchors_before(q_start)
    runs = torch.stack(
        [
            anchor_queries + others_before(begins.clamp(min=q_start)) - before_chunk,
            anchor_queries + others_before(ends.clamp(max=q_end)) - before_chunk,
            anchors + others_before(begins),
            anchors + others_before(ends),
        ],
        dim=1,
    )
    return runs[runs[:, 1] > runs[:, 0]]
