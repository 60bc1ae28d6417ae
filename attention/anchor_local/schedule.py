"""The schedule of anchor_local: tiles of queries of all heads, those of anchors first.

Knows layouts. Does not know kernels.
"""

from functools import lru_cache

import torch
from torch import Tensor

from attention.anchor_local.tile_table import tile_table
from attention.layout import AnchorLocalLayout
from attention.schedule import Schedule, handed_out

FIELDS = 7
# What an item costs besides its tiles of keys, in tiles: its queries are fetched, its result is stored.
_ITEM_TILES = 1


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
    """The schedule for tiles of ``block_m`` queries and ``block_n`` keys.

    FIELDS of an item: first query and end, first key and end of the segment, keys before it (all for anchor
    queries), batch entry, and head.
    """
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
    return handed_out(items, _costs(items, block_n), programs, device)


def _costs(items: Tensor, block_n: int) -> list[int]:
    """Tiles of keys of each item, and what else it costs."""
    keys = items[:, 3] - items[:, 2]
    tiles = (items[:, 4] + block_n - 1) // block_n + (keys + block_n - 1) // block_n
    costs: list[int] = (tiles + _ITEM_TILES).tolist()
    return costs
