"""The table of query tiles that the kernels of anchor_local walk.

Knows layouts. Does not know kernels.
"""

from functools import lru_cache

import torch
from torch import Tensor

from attention.layout import AnchorLocalLayout


@lru_cache(maxsize=64)
def tile_table(layout: AnchorLocalLayout, block_m: int, device: torch.device) -> tuple[Tensor, int]:
    """int32 [tiles, 4] (query begin, end, key begin, end), anchor tiles first; and how many those are."""
    anchor_run = torch.tensor([[0, layout.anchor_queries, 0, 0]])
    runs = torch.cat([anchor_run, layout.runs])
    per_run = (runs[:, 1] - runs[:, 0] + block_m - 1) // block_m
    tiles = runs.repeat_interleave(per_run, dim=0)
    first_of_run = per_run.cumsum(0) - per_run
    within = torch.arange(tiles.shape[0]) - first_of_run.repeat_interleave(per_run)
    tiles[:, 0] += within * block_m
    return tiles.to(device=device, dtype=torch.int32), int(per_run[0])
