"""The schedule of block_topk's persistent kernel: tiles of queries of all heads, those that see all first.

Which boxes are kept is known on the GPU only; how many are is known here, and that is what an item costs.

Knows layouts. Does not know kernels.
"""

from functools import lru_cache

import torch

from attention.block_topk.boxes import kept_boxes
from attention.block_topk.layout import BoxLayout
from attention.block_topk.tile_table import tile_table
from attention.schedule import Schedule, handed_out

FIELDS = 6
# What an item costs besides its tiles of keys, in tiles: its queries are fetched, its result is stored.
_ITEM_TILES = 1


@lru_cache(maxsize=64)
def schedule(
    layout: BoxLayout,
    top_k: float,
    batch: int,
    heads: int,
    block_m: int,
    block_n: int,
    programs: int,
    device: torch.device,
) -> Schedule:
    """The schedule for tiles of ``block_m`` queries and ``block_n`` keys, and for at most so many programs.

    FIELDS of an item: first query and end, number of keys at the start that it sees, its row of the lists of
    kept boxes (-1: it sees all keys already), batch entry, and head.
    """
    tiles, first_tiles = tile_table(layout, block_m, torch.device("cpu"))
    keys = torch.tensor(_expected_keys(layout, top_k))
    pairs = torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).view(-1, 2)
    items, costs = [], []
    for sees_all, part in ((True, tiles[:first_tiles]), (False, tiles[first_tiles:])):
        count = part.shape[0]
        entry, head = pairs.repeat_interleave(count, dim=0).unbind(1)
        begin, end, box = part.long().repeat(pairs.shape[0], 1).unbind(1)
        first = torch.full_like(begin, layout.tokens if sees_all else layout.first)
        row = torch.full_like(begin, -1) if sees_all else (entry * heads + head) * layout.boxes + box
        items.append(torch.stack([begin, end, first, row, entry, head], dim=1))
        seen = first if sees_all else first + keys[box]
        costs.append((seen + block_n - 1) // block_n + _ITEM_TILES)
    found = torch.cat(items).int()
    return handed_out(found, torch.cat(costs).tolist(), min(programs, found.shape[0]), device)


def _expected_keys(layout: BoxLayout, top_k: float) -> list[int]:
    """Keys that a query of each box sees in boxes, if those that may be chosen are all alike."""
    most = kept_boxes(top_k, layout.boxes) if layout.boxes else 0
    lengths = [end - begin for begin, end in zip(layout.begins, layout.begins[1:], strict=False)]
    all_keys = sum(lengths)
    found = []
    for always, touching in zip(layout.always.tolist(), layout.neighbours, strict=True):
        near = sum(length for length, is_near in zip(lengths, always, strict=True) if is_near)
        others = layout.boxes - 1 - touching
        chosen = max(most - 1 - touching, 0)
        found.append(near + (all_keys - near) * chosen // max(others, 1))
    return found
