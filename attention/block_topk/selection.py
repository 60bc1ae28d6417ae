"""Which boxes of keys each box of queries keeps, in plain PyTorch.

Knows layouts. Does not know how the kept boxes are attended to.

The score of a box of keys for a box of queries is ``scale`` times the product of the mean query and the mean
key, for each batch entry and head. A box keeps itself, the boxes that touch it, and of the others those with
the highest scores, until it has as many as it may; of equal ones those with the lowest numbers.
"""

from functools import lru_cache

import torch
from torch import Tensor

from attention.block_topk.boxes import kept_boxes
from attention.block_topk.layout import BoxLayout


@lru_cache(maxsize=64)
def kept_counts(layout: BoxLayout, top_k: float) -> tuple[Tensor, int]:
    """int32 [boxes] on the device: boxes that each box keeps; and the most of them."""
    most = kept_boxes(top_k, layout.boxes)
    counts = [max(most, 1 + touching) for touching in layout.neighbours]
    return torch.tensor(counts, dtype=torch.int32, device=layout.bounds.device), max(counts, default=0)


def box_means(x: Tensor, layout: BoxLayout) -> Tensor:
    """Mean of each box of ordered x [batch, tokens, heads, head_dim]: [batch, heads, boxes, head_dim].

    In float32; float64 for float64.
    """
    wide = x[:, layout.first :].to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    lengths = layout.bounds.diff().long()
    box = torch.arange(layout.boxes, device=x.device).repeat_interleave(
        lengths, output_size=layout.tokens - layout.first
    )
    sums = wide.new_zeros(x.shape[0], layout.boxes, *x.shape[2:]).index_add_(1, box, wide)
    return (sums / lengths[:, None, None]).transpose(1, 2).contiguous()


def box_scores(q_means: Tensor, k_means: Tensor, scale: float) -> Tensor:
    """Scores [batch, heads, boxes, boxes] of means [batch, heads, boxes, head_dim] and the keys' like."""
    batch, heads, boxes, head_dim = q_means.shape
    kv_heads = k_means.shape[1]
    grouped = q_means.reshape(batch, kv_heads, heads // kv_heads * boxes, head_dim)
    return (grouped * scale @ k_means.mT).view(batch, heads, boxes, boxes)


def selected_boxes(scores: Tensor, always: Tensor, counts: Tensor) -> Tensor:
    """bool [batch, heads, boxes, boxes]: does the box (third) keep that box (fourth)?

    Args:
        scores: [batch, heads, boxes, boxes]; NaN is below everything.
        always: bool [boxes, boxes], those kept whatever they score.
        counts: int32 [boxes], how many each box keeps; at least as many as it always does.
    """
    finite = torch.finfo(scores.dtype)
    ranked = scores.nan_to_num(nan=float("-inf"), posinf=finite.max, neginf=float("-inf"))
    ranked = ranked.masked_fill(always, float("inf"))
    order = ranked.argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(scores.shape[-1], device=scores.device)
    return torch.zeros_like(ranked, dtype=torch.bool).scatter_(
        -1, order, (place < counts[:, None]).expand_as(order)
    )


def kept_pairs(selected: Tensor, layout: BoxLayout) -> Tensor:
    """int64 []: (query, key) pairs within boxes that attend, over all heads and batch entries."""
    lengths = layout.bounds.diff().long()
    keys = torch.where(selected, lengths, 0).sum(-1)
    return (keys * lengths).sum()
