"""The table of query tiles that the kernels of block_topk walk.

Knows layouts. Does not know kernels.
"""

from functools import lru_cache

import torch
from torch import Tensor

from attention.block_topk.layout import BoxLayout


@lru_cache(maxsize=64)
def tile_table(layout: BoxLayout, block_m: int, device: torch.device) -> tuple[Tensor, int]:
    """int32 [tiles, 3] (query begin, end, box), those that see all first; and how many those are."""
    runs = torch.tensor(
        [(0, layout.first, 0), *((*layout.begins[i : i + 2], i) for i in range(layout.boxes))]
    )
    per_run = (runs[:, 1] - runs[:, 0] + block_m - 1) // block_m
    tiles = runs.repeat_interleave(per_run, dim=0)
    within = torch.arange(tiles.shape[0]) - (per_run.cumsum(0) - per_run).repeat_interleave(per_run)
    tiles[:, 0] += within * block_m
    return tiles.to(device=device, dtype=torch.int32), int(per_run[0])
