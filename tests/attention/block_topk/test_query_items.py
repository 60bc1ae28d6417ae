"""What programs of Hopper's kernel take: everything once, longest first."""

import pytest
import torch

from attention.block_topk.boxes import BoxPattern
from attention.block_topk.layout import box_layout
from attention.block_topk.query_items import FIELDS, query_items
from attention.tiles import Grid

CPU = torch.device("cpu")
BLOCK_M = 128
CASES = [
    # grid, sides of a box, stride of anchors, text, batch, heads
    ((5, 12, 14), (2, 5, 9), 7, 3, 2, 3),
    ((5, 12, 14), (5, 6, 7), None, 0, 1, 2),
    ((1, 2, 3), (1, 2, 2), None, 0, 1, 1),
    ((2, 3, 4), (1, 3, 4), 1, 0, 1, 2),  # all anchors
]


@pytest.mark.parametrize(("grid", "tile", "stride", "text", "batch", "heads"), CASES)
def test_every_query_of_every_head_once(
    grid: Grid, tile: Grid, stride: int | None, text: int, batch: int, heads: int
) -> None:
    layout = box_layout(BoxPattern(tile, anchor_stride=stride), grid, CPU, text)
    items = query_items(layout, batch, heads, BLOCK_M, CPU)
    assert (items.dtype, items.shape[1]) == (torch.int32, FIELDS)
    found = []
    for begin, end, first, row, entry, head in items.tolist():
        box = row - (entry * heads + head) * layout.boxes
        if row < 0:
            assert (first, end) == (layout.tokens, layout.first)
        else:
            assert first == layout.first
            assert layout.begins[box] <= begin < end == layout.begins[box + 1]
        found += [(entry, head, query) for query in range(begin, min(begin + BLOCK_M, end))]
    expected = [(b, h, query) for b in range(batch) for h in range(heads) for query in range(layout.tokens)]
    assert sorted(found) == expected


def test_those_that_see_all_come_first_and_then_head_by_head() -> None:
    layout = box_layout(BoxPattern((2, 5, 9), anchor_stride=7), (5, 12, 14), CPU)
    items = query_items(layout, 1, 3, BLOCK_M, CPU)
    sees_all = items[:, 3] < 0
    count = int(sees_all.sum())
    assert count > 0
    assert bool(sees_all[:count].all())
    for part in (items[:count], items[count:]):
        assert part[:, 5].tolist() == sorted(part[:, 5].tolist())
