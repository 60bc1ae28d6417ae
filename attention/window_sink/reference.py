"""The definition of window_sink in plain PyTorch: what the fast implementations are tested against."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from attention.window_sink.sinks import Sinks
from attention.window_sink.window import Window


def allowed(window: Window, q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Boolean [queries, keys]: may the token at this position of a sequence attend to that one?"""
    q, k = q_positions[:, None], k_positions[None, :]
    distance = k // window.unit - q // window.unit
    mask = torch.ones_like(distance, dtype=torch.bool)
    if window.left is not None:
        mask &= distance >= -window.left
    if window.right is not None:
        mask &= distance <= window.right
    mask |= (k < window.global_keys) | (q < window.global_queries)
    return mask & (k <= q) if window.causal else mask


def window_sink_reference(
    q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int], window: Window, scale: float, sinks: Sinks | None
) -> Tensor:
    """Dense masked softmax, sequence by sequence, in float64 if the inputs are, else in float32.

    Args:
        q: [total, heads, head_dim].
        k, v: [total, kv_heads, head_dim]; heads is a multiple of kv_heads.
        bounds: sequence i is rows ``bounds[i] .. bounds[i + 1] - 1``.

    Returns:
        [total, heads, head_dim], dtype of q.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for begin, end in pairwise(bounds):
        queries = q[begin:end].to(wide)
        keys = k[begin:end].to(wide).repeat_interleave(group, dim=1)
        values = v[begin:end].to(wide).repeat_interleave(group, dim=1)
        positions = torch.arange(end - begin, device=q.device)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        if sinks is not None and sinks.mode == "key0_bias":
            scores[:, :, :1] += sinks.logits.to(wide)[:, None, None]
        scores = scores.masked_fill(~allowed(window, positions, positions), float("-inf"))
        if sinks is not None and sinks.mode == "null_logit":
            null = sinks.logits.to(wide)[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat([scores, null], dim=2)
        weights = scores.softmax(-1)[:, :, : end - begin]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out
