"""Which boxes are kept, and the lists that the kernel makes of them."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.block_topk.boxes import BoxPattern
from attention.block_topk.layout import box_layout
from attention.block_topk.selection import box_means, box_scores, kept_counts, kept_pairs, selected_boxes
from attention.block_topk.triton_selection import box_means_triton, key_lists
from tests.attention.block_topk.helpers import CASES, DEVICE, Case, inputs, selection

top_ks = st.floats(0.01, 0.99) | st.integers(1, 12)
# With ties, both zeros, and what overflow leaves.
values = st.sampled_from([-2.0, -1.0, -0.0, 0.0, 0.5, 1.0, 3e38, float("inf"), float("-inf"), float("nan")])


@settings(max_examples=60)
@given(st.tuples(*[st.integers(1, 5)] * 3), st.tuples(*[st.integers(1, 3)] * 3), top_ks, st.data())
def test_what_is_always_kept_is_and_of_the_others_the_best(
    grid: tuple[int, int, int], tile: tuple[int, int, int], top_k: float, data: st.DataObject
) -> None:
    stride = data.draw(st.none() | st.integers(2, 9))
    pattern = BoxPattern(tile, anchor_stride=stride)
    boxes, layout = pattern.boxes(grid), box_layout(pattern, grid, torch.device("cpu"))
    count = layout.boxes
    numbers = data.draw(st.lists(values, min_size=count, max_size=count))
    scores = torch.tensor(numbers).roll(1).expand(1, 1, count, count).clone()
    kept = selected_boxes(scores, layout.always, kept_counts(layout, top_k)[0])[0, 0]
    ranked = scores[0, 0].nan_to_num(nan=float("-inf"), posinf=3.4e38, neginf=float("-inf"))
    for box, (touching, how_many) in enumerate(zip(boxes.neighbours, boxes.kept(top_k), strict=True)):
        assert kept[box, [box, *touching]].all()
        assert int(kept[box].sum()) == how_many
        chosen = kept[box] & ~layout.always[box]
        if chosen.any() and not kept[box].all():
            assert ranked[box][chosen].min() >= ranked[box][~kept[box]].max()


def test_of_equal_scores_the_lower_number_is_kept() -> None:
    """Both zeros are equal; ten runs, of which each keeps itself, those beside it, and others up to five."""
    layout = box_layout(BoxPattern(block_size=4), (1, 1, 40), torch.device(DEVICE))
    scores = torch.zeros(1, 1, 10, 10, device=DEVICE)
    scores[..., ::2] = -0.0
    selected = selected_boxes(scores, layout.always, kept_counts(layout, 5)[0])[0, 0]
    for box, row in enumerate(selected.tolist()):
        beside = [j for j in range(10) if abs(j - box) <= 1]
        others = [j for j in range(10) if j not in beside][: 5 - len(beside)]
        assert [j for j, is_kept in enumerate(row) if is_kept] == sorted(beside + others)
    lists = key_lists(scores, layout, 5, 16, pooled_rest=True, tally=None)
    assert lists.rest_bias is not None
    assert torch.equal(lists.rest_bias.isinf(), selected)


def test_a_score_that_is_no_number_is_below_all() -> None:
    layout = box_layout(BoxPattern(block_size=4), (1, 1, 40), torch.device(DEVICE))
    scores = torch.full((1, 1, 10, 10), -1.0, device=DEVICE)
    scores[..., 3] = float("nan")
    selected = selected_boxes(scores, layout.always, kept_counts(layout, 5)[0])[0, 0]
    assert selected[0].nonzero()[:, 0].tolist() == [0, 1, 2, 4, 5]
    assert bool(selected[3, 3])
    lists = key_lists(scores, layout, 5, 16, pooled_rest=True, tally=None)
    assert lists.rest_bias is not None
    assert torch.equal(lists.rest_bias.isinf(), selected)


@settings(max_examples=12)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    top_ks,
    st.sampled_from([16, 32]),
    st.booleans(),
    st.data(),
)
def test_lists_hold_the_kept_boxes_once(
    tokens: int, size: int, top_k: float, block_n: int, tallied: bool, data: st.DataObject
) -> None:
    """The kernel's choice and lists against those of PyTorch, on the same scores, ties included."""
    size = max(size, -(-tokens // 6))
    pattern = BoxPattern(block_size=size, anchor_stride=data.draw(st.none() | st.integers(2, 9)))
    layout = box_layout(pattern, (1, 1, tokens), torch.device(DEVICE), text=data.draw(st.integers(0, 2)))
    count = layout.boxes
    if not count:
        return
    numbers = data.draw(st.lists(values, min_size=count * count, max_size=count * count))
    scores = torch.tensor(numbers, device=DEVICE).view(1, 1, count, count)
    tally = torch.full((), 5, dtype=torch.int64, device=DEVICE) if tallied else None
    lists = key_lists(scores, layout, top_k, block_n, pooled_rest=True, tally=tally)
    selected = selected_boxes(scores, layout.always, kept_counts(layout, top_k)[0])
    _check_lists(lists.whole, lists.partial, lists.counts, selected[0, 0], layout.begins, block_n)
    assert lists.rest_bias is not None
    lengths = layout.log2_lengths.expand(count, count)
    assert torch.equal(lists.rest_bias, lengths.masked_fill(selected[0, 0], float("-inf")))
    if tally is not None:
        assert int(tally) == 5 + int(kept_pairs(selected, layout))


def _check_lists(
    whole: Tensor, partial: Tensor, counts: Tensor, kept: Tensor, begins: tuple[int, ...], block_n: int
) -> None:
    for box, row in enumerate(kept.tolist()):
        expected = [
            key
            for (a, b), is_kept in zip(pairwise(begins), row, strict=True)
            if is_kept
            for key in range(a, b)
        ]
        wholes, partials = counts[box].tolist()
        found = [key for begin in whole[box, :wholes].tolist() for key in range(begin, begin + block_n)]
        for begin, keys in partial[box, :partials].tolist():
            assert 0 < keys < block_n
            found += range(begin, begin + keys)
        assert sorted(found) == expected
        # No more tiles that are not whole than ranges of kept boxes.
        assert partials <= sum(now and not before for before, now in pairwise([False, *row]))


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[2]], ids=str)
def test_means_of_boxes(case: Case) -> None:
    q, k, _ = inputs(case, torch.float32)
    layout = case.layout()
    q, k = (x.index_select(1, layout.order) for x in (q, k))
    for x in (q, k):
        expected = torch.stack([x[:, a:b].double().mean(1) for a, b in pairwise(layout.begins)], dim=2)
        for means in (box_means(x, layout), box_means_triton(x, layout)):
            torch.testing.assert_close(means.double(), expected, rtol=1e-5, atol=1e-6)
    scores = box_scores(box_means(q, layout), box_means(k, layout), 0.5)
    group = case.heads // case.kv_heads
    for head in range(case.heads):
        one = box_means(q, layout)[:, head] @ box_means(k, layout)[:, head // group].mT * 0.5
        torch.testing.assert_close(scores[:, head], one)


def test_heads_and_entries_choose_for_themselves() -> None:
    case = Case((1, 8, 8), 3, block_size=4, batch=2, heads=2)
    q, k, _ = inputs(case, torch.float32)
    _, selected = selection(case, q, k, "torch")
    flat = selected.flatten(0, 1)
    assert all(not torch.equal(a, b) for i, a in enumerate(flat) for b in flat[:i])
