"""The schedule of Hopper's kernel: everything once, everyone about the same."""

import itertools

import pytest
import torch

from attention.block_topk.boxes import BoxPattern
from attention.block_topk.layout import box_layout
from attention.block_topk.schedule import FIELDS, schedule
from attention.tiles import Grid

CPU = torch.device("cpu")
BLOCK_M, BLOCK_N = 128, 64
CASES = [
    # grid, sides of a box, stride of anchors, text, batch, heads, programs
    ((5, 12, 14), (2, 5, 9), 7, 3, 2, 3, 13),
    ((5, 12, 14), (5, 6, 7), None, 0, 1, 2, 5),
    ((1, 2, 3), (1, 2, 2), None, 0, 1, 1, 132),
    ((2, 3, 4), (1, 3, 4), 1, 0, 1, 2, 7),  # all anchors
]


@pytest.mark.parametrize(("grid", "tile", "stride", "text", "batch", "heads", "programs"), CASES)
def test_every_query_of_every_head_once(
    grid: Grid, tile: Grid, stride: int | None, text: int, batch: int, heads: int, programs: int
) -> None:
    layout = box_layout(BoxPattern(tile, anchor_stride=stride), grid, CPU, text)
    work = schedule(layout, 0.3, batch, heads, BLOCK_M, BLOCK_N, programs, CPU)
    assert work.items.shape[1] == FIELDS
    found = []
    for begin, end, first, row, entry, head in work.items.tolist():
        box = row - (entry * heads + head) * layout.boxes
        if row < 0:
            assert (first, end) == (layout.tokens, layout.first)
        else:
            assert first == layout.first
            assert layout.begins[box] <= begin < end == layout.begins[box + 1]
        found += [(entry, head, query) for query in range(begin, min(begin + BLOCK_M, end))]
    expected = [(b, h, query) for b in range(batch) for h in range(heads) for query in range(layout.tokens)]
    assert sorted(found) == expected
    starts = work.starts.tolist()
    assert len(starts) == work.programs + 1 <= programs + 1
    assert (starts[0], starts[-1]) == (0, len(work.items))
    assert all(a < b for a, b in itertools.pairwise(starts))  # nobody comes for nothing


@pytest.mark.parametrize("stride", [None, 16])
def test_programs_have_about_as_much_to_do(stride: int | None) -> None:
    pattern, heads, programs, top_k = BoxPattern((21, 6, 4), anchor_stride=stride), 12, 132, 0.2
    layout = box_layout(pattern, (21, 30, 52), CPU)
    work = schedule(layout, top_k, 1, heads, 128, 128, programs, CPU)
    # All boxes have about the same length, so all queries that do not see everything see as many keys.
    kept = top_k * (layout.tokens - layout.first)
    keys = work.items[:, 2] + torch.where(work.items[:, 3] < 0, 0, kept)
    starts = work.starts.tolist()
    loads = [float(keys[a:b].sum()) for a, b in itertools.pairwise(starts)]
    assert max(loads) - min(loads) <= 1.1 * (layout.first + kept)
    # Long items come first.
    first = [int(keys[a]) for a in starts[:-1]]
    assert max(first) == int(keys.max())


def test_one_program_has_all_in_the_order_of_heads() -> None:
    """As the kernel counts them: those that see all of every head, then boxes, head by head."""
    layout = box_layout(BoxPattern((2, 5, 9), anchor_stride=7), (5, 12, 14), CPU)
    items = schedule(layout, 0.3, 1, 3, BLOCK_M, BLOCK_N, 1, CPU).items
    sees_all = items[:, 3] < 0
    count = int(sees_all.sum())
    assert count > 0
    assert bool(sees_all[:count].all())
    for part in (items[:count], items[count:]):
        assert part[:, 5].tolist() == sorted(part[:, 5].tolist())
