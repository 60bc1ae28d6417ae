"""Boxes in integers, and the layout made of them."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.block_topk.boxes import MAX_BOXES, BoxPattern, kept_boxes
from attention.block_topk.layout import box_layout, box_numbers
from configs.attention import MAX_BOXES as MAX_BOXES_OF_SETTINGS

sides = st.tuples(*[st.integers(1, 5)] * 3)


@settings(max_examples=60)
@given(sides, sides, st.none() | st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_layout_puts_every_token_into_its_box(
    grid: tuple[int, int, int], tile: tuple[int, int, int], stride: int | None, text: int, runs: bool
) -> None:
    pattern = BoxPattern(None if runs else tile, tile[0] * 3 if runs else None, stride)
    boxes, layout = pattern.boxes(grid), box_layout(pattern, grid, torch.device("cpu"), text)
    number, is_anchor = box_numbers(pattern, grid)
    tokens = math.prod(grid)
    assert sorted(layout.order.tolist()) == list(range(text + tokens))
    assert torch.equal(layout.order[layout.inverse], torch.arange(text + tokens))
    assert (layout.first, layout.tokens) == (text + int(is_anchor.sum()), text + tokens)
    assert layout.begins[0] == layout.first
    assert layout.begins[-1] == text + tokens
    for box, length in enumerate(boxes.lengths):
        members = layout.order[layout.begins[box] : layout.begins[box + 1]] - text
        assert len(members) == length > 0
        assert len(set(number[members].tolist())) == 1
        assert not is_anchor[members].any()
        assert torch.equal(
            layout.always[box].nonzero()[:, 0], torch.tensor(sorted([box, *boxes.neighbours[box]]))
        )
    assert torch.equal(layout.always, layout.always.T)


def test_boxes_that_touch_are_one_step_apart_on_one_axis() -> None:
    boxes = BoxPattern((2, 3, 1)).boxes((5, 6, 4))  # 3 x 2 x 4 boxes
    places = list(product(range(3), range(2), range(4)))
    for box, place in enumerate(places):
        steps = [sum(abs(a - b) for a, b in zip(place, other, strict=True)) for other in places]
        assert boxes.neighbours[box] == tuple(i for i, step in enumerate(steps) if step == 1)
    runs = BoxPattern(block_size=5).boxes((1, 2, 8))
    assert runs.neighbours == ((1,), (0, 2), (1, 3), (2,))
    assert runs.lengths == (5, 5, 5, 1)


def test_boxes_of_anchors_alone_are_left_out() -> None:
    boxes = BoxPattern(block_size=1, anchor_stride=3).boxes((1, 1, 7))
    assert (boxes.lengths, boxes.anchors) == ((1, 1, 1, 1), 3)
    assert boxes.neighbours == ((1,), (0,), (3,), (2,))


@pytest.mark.parametrize(
    ("top_k", "boxes", "kept"),
    [(0.2, 65, 13), (0.2, 66, 14), (0.07, 100, 7), (0.999, 10, 10), (1, 10, 1), (12, 10, 10), (1e-12, 5, 0)],
)
def test_a_share_is_rounded_up_and_a_count_is_a_count(top_k: float, boxes: int, kept: int) -> None:
    assert kept_boxes(top_k, boxes) == kept


def test_a_box_keeps_itself_and_its_neighbours_even_if_that_is_more() -> None:
    boxes = BoxPattern((1, 1, 1)).boxes((1, 3, 3))
    assert boxes.kept(1) == (3, 4, 3, 4, 5, 4, 3, 4, 3)
    assert boxes.kept(4) == (4, 4, 4, 4, 5, 4, 4, 4, 4)
    assert boxes.kept(0.999) == (9,) * 9


def test_expected_pairs_are_exact_for_equal_boxes_and_for_all_of_them() -> None:
    equal = BoxPattern((1, 2, 2)).boxes((2, 4, 4))  # 8 boxes of 4
    assert equal.expected_pairs(5) == 8 * 4 * 5 * 4
    unequal = BoxPattern((2, 3, 3), anchor_stride=5).boxes((3, 4, 4))
    assert unequal.expected_pairs(0.999) == pytest.approx(48**2)
    assert BoxPattern(block_size=3, anchor_stride=1).boxes((1, 2, 4)).expected_pairs(2) == 64


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "boxes need tile_thw or block_size, one of them; got None and None"),
        ({"tile_thw": (1, 1, 1), "block_size": 3}, "one of them"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"tile_thw": (1, 0, 1)}, "tile_thw must be three sides of at least 1 token"),
        ({"block_size": 3, "anchor_offset": 1}, "anchor_offset=1 without an anchor_stride"),
        ({"block_size": 3, "anchor_stride": 4, "anchor_offset": 4}, "anchor_offset must lie in"),
    ],
)
def test_patterns_out_of_range_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BoxPattern(**values)  # type: ignore[arg-type]


def test_too_many_boxes_are_refused() -> None:
    assert MAX_BOXES == MAX_BOXES_OF_SETTINGS
    with pytest.raises(ValueError, match=r"block_size=1 cuts 2049 tokens into 2049 boxes; at most 2048"):
        BoxPattern(block_size=1).boxes((1, 1, 2049))
    assert len(BoxPattern(block_size=1).boxes((1, 1, 2048)).lengths) == MAX_BOXES
