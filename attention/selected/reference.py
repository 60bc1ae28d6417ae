"""The definition of sparse_attn in plain PyTorch: what the fast implementations are tested against."""

import torch
from torch import Tensor


def sparse_attn_reference(q: Tensor, kv: Tensor, sink: Tensor, topk_idxs: Tensor, scale: float) -> Tensor:
    """Softmax over the listed rows and the sink, in float64 if the inputs are, else in float32.

    Args:
        q: [batch, queries, heads, d].
        kv: [batch, rows, d], keys and values at once.
        sink: [heads], not scaled; -inf is no sink.
        topk_idxs: [batch, queries, k]; an index outside 0 .. rows - 1 lists no key.

    Returns:
        [batch, queries, heads, d], dtype of q; 0 for a query that lists nothing.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for queries, rows, lists, result in zip(q.to(wide), kv.to(wide), topk_idxs, out, strict=True):
        for query, listed, attended in zip(queries, lists, result, strict=True):
            keys = rows[listed[(listed >= 0) & (listed < len(rows))]]
            if len(keys):
                logits = torch.cat([query @ keys.T * scale, sink.to(wide)[:, None]], dim=1)
                attended.copy_(logits.softmax(1)[:, :-1] @ keys)
    return out
