"""Which program of a persistent kernel computes which tile of queries of which head, and when.

Tiles are handed out ahead of time as a counter in memory would: in order, the longest first, each to the
program that has the least to do so far. So all end at about the same time, and nothing is counted on the GPU.

Knows layouts. Does not know kernels.
"""

import heapq
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attention.anchor_local.tile_table import tile_table
from attention.layout import AnchorLocalLayout

FIELDS = 7
# What an item costs besides its tiles of keys, in tiles: its queries are fetched, its result is stored.
_ITEM_TILES = 1


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The work of all programs.

    Attributes:
        items: int32 [items, FIELDS], on the device: first query and end, first key and end of the segment,
            keys before it (all for anchor queries), batch entry, and head. The items of a program are
            neighbours.
        starts: int32 [programs + 1], on the device; the items of program p are ``starts[p]`` to
            ``starts[p + 1]``.
        programs: how many programs there are.
    """

    items: Tensor
    starts: Tensor
    programs: int


@lru_cache(maxsize=64)
def schedule(
    layout: AnchorLocalLayout,
    batch: int,
    heads: int,
    block_m: int,
    block_n: int,
    programs: int,
    device: torch.device,
) -> Schedule:
    """The schedule for tiles of ``block_m`` queries and ``block_n`` keys."""
    tiles, anchor_tiles = tile_table(layout, block_m, torch.device("cpu"))
    first = torch.full([tiles.shape[0], 1], layout.anchors, dtype=torch.int32)
    first[:anchor_tiles] = layout.tokens
    pairs = torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).int().view(-1, 2)
    parts = []
    for part in (slice(None, anchor_tiles), slice(anchor_tiles, None)):
        count = tiles[part].shape[0]
        per_head = torch.cat([tiles[part], first[part]], dim=1).repeat(pairs.shape[0], 1)
        parts.append(torch.cat([per_head, pairs.repeat_interleave(count, dim=0)], dim=1))
    items = torch.cat(parts)
    program = torch.tensor(_handed_out(_costs(items, block_n), programs), dtype=torch.int64)
    starts = torch.zeros(programs + 1, dtype=torch.int32)
    starts[1:] = program.bincount(minlength=programs).cumsum(0)
    items = items[program.argsort(stable=True)].contiguous()
    return Schedule(items.to(device), starts.to(device), programs)


def _costs(items: Tensor, block_n: int) -> list[int]:
    """Tiles of keys of each item, and what else it costs."""
    keys = items[:, 3] - items[:, 2]
    tiles = (items[:, 4] + block_n - 1) // block_n + (keys + block_n - 1) // block_n
    costs: list[int] = (tiles + _ITEM_TILES).tolist()
    return costs


def _handed_out(costs: list[int], programs: int) -> list[int]:
    """The program of each item."""
    loads = [(0, program) for program in range(programs)]
    found = []
    for cost in costs:
        load, program = loads[0]
        heapq.heapreplace(loads, (load + cost, program))
        found.append(program)
    return found
