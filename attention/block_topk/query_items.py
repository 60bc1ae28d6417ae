"""What the programs of block_topk's persistent kernel take: tiles of queries of all heads, longest first.

Knows layouts. Does not know kernels, or who takes what.
"""

from functools import lru_cache

import torch
from torch import Tensor

from attention.block_topk.layout import BoxLayout
from attention.block_topk.tile_table import tile_table

FIELDS = 6


@lru_cache(maxsize=64)
def query_items(layout: BoxLayout, batch: int, heads: int, block_m: int, device: torch.device) -> Tensor:
    """Tiles of ``block_m`` queries: int32 [items, FIELDS], on the device.

    Those that see all keys come first, of every head; then those of boxes, head by head, so that programs
    that run together share keys in the L2 cache.

    FIELDS of an item: first query and end, number of keys at the start that it sees, its row of the lists of
    kept boxes (-1: it sees all keys already), batch entry, and head.
    """
    tiles, first_tiles = tile_table(layout, block_m, torch.device("cpu"))
    pairs = torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).view(-1, 2)
    items = []
    for sees_all, part in ((True, tiles[:first_tiles]), (False, tiles[first_tiles:])):
        entry, head = pairs.repeat_interleave(part.shape[0], dim=0).unbind(1)
        begin, end, box = part.long().repeat(pairs.shape[0], 1).unbind(1)
        first = torch.full_like(begin, layout.tokens if sees_all else layout.first)
        row = torch.full_like(begin, -1) if sees_all else (entry * heads + head) * layout.boxes + box
        items.append(torch.stack([begin, end, first, row, entry, head], dim=1))
    return torch.cat(items).int().to(device)
