"""sparse_attn in PyTorch, in chunks of queries: what a CPU runs.

The rows that a chunk's queries list are gathered for all heads at once; they are the largest thing that is
ever built, at most ``_GATHERED_BYTES`` (or the rows of one query, if that is more).
"""

import torch
from torch import Tensor

_GATHERED_BYTES = 32 * 2**20


def sparse_attn_torch(q: Tensor, kv: Tensor, sink: Tensor, topk_idxs: Tensor, scale: float) -> Tensor:
    """Attention of q [b, m, h, d] over the listed rows of kv [b, n, d]; returns [b, m, h, d].

    Computes in float64 if the inputs are, else in float32.
    """
    batch, queries, _, width = q.shape
    listed = topk_idxs.shape[2]
    if q.numel() == 0 or listed == 0 or kv.shape[1] == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    chunk = max(1, _GATHERED_BYTES // (listed * width * torch.float64.itemsize))
    for sequence in range(batch):
        for first in range(0, queries, chunk):
            rows = slice(first, first + chunk)
            out[sequence, rows] = _attend(
                q[sequence, rows], kv[sequence], sink, topk_idxs[sequence, rows], scale
            )
    return out


def _attend(q: Tensor, kv: Tensor, sink: Tensor, lists: Tensor, scale: float) -> Tensor:
    """One chunk: q [c, h, d] over the rows of kv [n, d] in lists [c, k]; returns [c, h, d]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    is_key = (lists >= 0) & (lists < kv.shape[0])
    # Rows that are not listed may hold anything, NaN too: zeros stand in for them.
    keys = torch.where(is_key[:, :, None], kv[lists.where(is_key, 0).long()], 0).to(wide)
    scores = (q.to(wide) * scale) @ keys.mT
    scores.masked_fill_(~is_key[:, None], float("-inf"))
    null = sink.to(wide)[:, None]
    peak = torch.maximum(scores.amax(-1, keepdim=True), null)
    peak = peak.where(peak > float("-inf"), 0)  # nothing is listed and there is no sink
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True) + (null - peak).exp()
    return ((weights @ keys) / total.where(total > 0, 1)).to(q.dtype)
