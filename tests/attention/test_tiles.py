"""The tile order: its definition token by token, the layout made of it, and the operator in float64."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.anchor_local.api import anchor_local_ordered
from attention.block_topk.boxes import BoxPattern
from attention.layout import clip_layout, frames_layout, tile_anchors, tile_boxes
from attention.pattern import AnchorLocalPattern
from attention.tiles import Grid, TilePattern, lattice_steps, tile_density
from attention.window_sink.reference import allowed as allowed_by_window
from attention.window_sink.window import Window

CPU = torch.device("cpu")
side = st.integers(1, 5)
grids = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 7))


@st.composite
def patterns(draw: st.DrawFn) -> TilePattern:
    stride = draw(st.integers(1, 40))
    return TilePattern(draw(st.tuples(side, side, side)), stride, draw(st.integers(0, stride - 1)))


def definition(pattern: TilePattern, grid: Grid) -> torch.Tensor:
    """The mask as the docstring says it, one token at a time."""
    frame_step, row_step = pattern.steps
    facts = [
        (
            (column + row_step * row + frame_step * frame) % pattern.anchor_stride == pattern.anchor_offset,
            tuple(at // tile for at, tile in zip((frame, row, column), pattern.tile_thw, strict=True)),
        )
        for frame, row, column in product(*map(range, grid))
    ]
    return torch.tensor(
        [[a or b or box == other for b, other in facts] for a, box in facts], dtype=torch.bool
    )


@given(patterns(), grids)
def test_integers_and_tensors_are_the_definition(pattern: TilePattern, grid: Grid) -> None:
    mask = definition(pattern, grid)
    anchor, box = tile_anchors(pattern, grid), tile_boxes(pattern, grid)
    assert torch.equal(mask, anchor[:, None] | anchor[None, :] | (box[:, None] == box[None, :]))
    assert pattern.allowed_pairs(grid) == int(mask.sum())
    assert pattern.is_full(grid) <= bool(mask.all())
    density = tile_density(grid, pattern.tile_thw, pattern.anchor_stride, pattern.anchor_offset)
    assert density == int(mask.sum()) / mask.numel()


@given(patterns(), grids, st.integers(0, 5))
def test_layout_visits_each_allowed_pair_once(pattern: TilePattern, grid: Grid, text: int) -> None:
    layout = clip_layout(pattern, grid, CPU, text)
    clip = definition(pattern, grid)
    mask = torch.ones(text + len(clip), text + len(clip), dtype=torch.bool)
    mask[text:, text:] = clip
    visited = torch.zeros(mask.shape, dtype=torch.int64)
    visited[: layout.anchor_queries] += 1
    for begin, end, key_begin, key_end in layout.runs.tolist():
        visited[begin:end, : layout.anchors] += 1
        visited[begin:end, key_begin:key_end] += 1
    assert torch.equal(visited, mask[layout.key_order][:, layout.key_order].long())
    assert torch.equal(layout.key_order[layout.query_inverse], torch.arange(layout.tokens))
    assert torch.equal(layout.key_order[:text], torch.arange(text))


@given(grids, st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(1, 4))
def test_frames_behind_text_are_the_window(grid: Grid, left: int, right: int, first: int, text: int) -> None:
    layout = frames_layout((left, right), first, grid, CPU, text)
    frame, total = grid[1] * grid[2], math.prod(grid)
    clip = allowed_by_window(
        Window(left, right, frame, first * frame), torch.arange(total), torch.arange(total)
    )
    mask = torch.ones(text + total, text + total, dtype=torch.int64)
    mask[text:, text:] = clip.long()
    visited = torch.zeros_like(mask)
    visited[: layout.anchor_queries] += 1
    for begin, end, key_begin, key_end in layout.runs.tolist():
        visited[begin:end, : layout.anchors] += 1
        visited[begin:end, key_begin:key_end] += 1
    assert torch.equal(visited, mask)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("text", [0, 7])
def test_operator_on_tiles_equals_masked_softmax(impl: Any, text: int) -> None:
    pattern, grid = TilePattern((2, 4, 4), 11, 3), (3, 6, 7)
    layout = clip_layout(pattern, grid, CPU, text)
    tokens = text + math.prod(grid)
    dtype = torch.float64 if impl == "torch" else torch.float32
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, tokens, 2, 16, generator=generator).to(dtype) for _ in range(3))
    ordered_q, ordered_k, ordered_v = (x.index_select(1, layout.key_order) for x in (q, k, v))
    out = anchor_local_ordered(ordered_q, ordered_k, ordered_v, layout, impl=impl)
    mask = torch.ones(tokens, tokens, dtype=torch.bool)
    mask[text:, text:] = definition(pattern, grid)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 4
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, v.double())
    error = (out.index_select(1, layout.query_inverse).double() - expected).abs().max()
    assert error < (1e-14 if impl == "torch" else 2e-6)


@pytest.mark.parametrize("stride", [2, 3, 8, 16, 17, 32, 64, 128])
def test_anchors_lie_about_as_far_apart_as_they_can(stride: int) -> None:
    """Nearest anchors in an endless clip: at least 3/5 of what no lattice of this density exceeds."""
    frame_step, row_step = lattice_steps(stride)
    reach = range(-8, 9)
    nearest = min(
        math.hypot(frame, row, column)
        for frame, row, column in product(reach, reach, reach)
        if (column + row_step * row + frame_step * frame) % stride == 0 and (frame, row, column) != (0, 0, 0)
    )
    assert nearest >= 0.6 * (math.sqrt(2) * stride) ** (1 / 3)


def test_each_token_is_an_anchor_at_exactly_one_offset() -> None:
    grid = (3, 5, 7)
    found = sum(tile_anchors(TilePattern((1, 1, 1), 16, offset), grid).long() for offset in range(16))
    assert torch.equal(torch.as_tensor(found), torch.ones(105, dtype=torch.int64))


def test_a_clip_in_raster_order_keeps_the_layout_of_its_tokens() -> None:
    layout = clip_layout(AnchorLocalPattern(20, 7, 3), (3, 5, 7), CPU)
    assert layout is clip_layout(AnchorLocalPattern(20, 7, 3), (3, 5, 7), CPU)
    assert (layout.tokens, layout.anchors) == (105, 15)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (((0, 1, 1), 4, 0), r"tile_thw must be three sides of at least 1 token, got \(0, 1, 1\)"),
        (((1, 1), 4, 0), "tile_thw must be three sides"),
        (((1, 1, 1), 0, 0), r"anchor_stride must lie in 1 \.\. 1024 for tiles, got 0"),
        (((1, 1, 1), 1025, 0), "got 1025"),
        (((1, 1, 1), 4, 4), r"anchor_offset must lie in \[0, anchor_stride=4\), got 4"),
    ],
)
def test_values_out_of_range_are_named(values: tuple[Grid, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TilePattern(*values)
    with pytest.raises(ValueError, match="grid must be three sides"):
        TilePattern((1, 1, 1), 2).allowed_pairs((1, 0, 1))


def test_sides_may_be_a_list_as_in_json() -> None:
    listed: Any = [5, 4, 4]
    pattern = TilePattern((5, 4, 4), 16)
    assert TilePattern(listed, 16) == pattern
    assert hash(TilePattern(listed, 16)) == hash(pattern)
    boxes = BoxPattern(listed)
    assert hash(boxes) == hash(BoxPattern((5, 4, 4)))
