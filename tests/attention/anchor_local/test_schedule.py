"""The schedule of Hopper's kernels: everything once, everyone about the same."""

import itertools

import pytest
import torch

from attention.anchor_local.schedule import FIELDS, schedule
from attention.anchor_local.tile_table import tile_table
from attention.layout import anchor_local_layout
from attention.pattern import AnchorLocalPattern

CPU = torch.device("cpu")
BLOCK_M, BLOCK_N = 128, 64
CASES = [
    # tokens, block size, stride, queries from, queries, batch, heads, programs
    (4001, 999, 17, 0, None, 2, 3, 13),
    (4001, 999, 17, 1000, 1500, 1, 4, 5),
    (70, 10, 7, 0, None, 1, 2, 132),
    (1, 1, 1, 0, None, 1, 1, 3),
    (2048, 2048, 1, 0, None, 1, 2, 7),
]


@pytest.mark.parametrize(
    ("tokens", "block", "stride", "start", "queries", "batch", "heads", "programs"), CASES
)
def test_every_tile_of_every_head_once(
    tokens: int,
    block: int,
    stride: int,
    start: int,
    queries: int | None,
    batch: int,
    heads: int,
    programs: int,
) -> None:
    layout = anchor_local_layout(AnchorLocalPattern(block, stride), tokens, CPU, start, queries)
    work = schedule(layout, batch, heads, BLOCK_M, BLOCK_N, programs, CPU)
    tiles, anchor_tiles = tile_table(layout, BLOCK_M, CPU)
    expected = [
        (*row[:4], layout.tokens if tile < anchor_tiles else layout.anchors, entry, head)
        for entry in range(batch)
        for head in range(heads)
        for tile, row in enumerate(tiles.tolist())
    ]
    found = work.items.tolist()
    assert sorted(tuple(item) for item in found) == sorted(expected)
    assert work.items.shape[1] == FIELDS
    starts = work.starts.tolist()
    assert len(starts) == programs + 1
    assert starts[0] == 0
    assert starts[-1] == len(found)
    assert starts == sorted(starts)


def test_programs_have_about_as_much_to_do() -> None:
    tokens, heads, programs = 32_760, 12, 132
    layout = anchor_local_layout(AnchorLocalPattern(3120, 16), tokens, CPU)
    work = schedule(layout, 1, heads, 128, 128, programs, CPU)
    keys = (work.items[:, 3] - work.items[:, 2]).long()
    cost = (work.items[:, 4] + 127) // 128 + (keys + 127) // 128
    starts = work.starts.tolist()
    loads = [int(cost[a:b].sum()) for a, b in itertools.pairwise(starts)]
    # Shared out in turn they would differ by the work of a tile of anchors, 256 tiles of keys.
    assert max(loads) - min(loads) <= 2 * 41
    # Long items come first.
    first = [cost[a] for a in starts[:-1]]
    assert min(first) == max(cost)
