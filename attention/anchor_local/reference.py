"""The definition of anchor_local in plain PyTorch: what the fast implementations are tested against."""

import torch
from torch import Tensor

from attention.pattern import AnchorLocalPattern

_ROWS_AT_ONCE = 512


def allowed(pattern: AnchorLocalPattern, q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Boolean [queries, keys]: may the token at this position attend to that one?"""
    q, k = q_positions[:, None], k_positions[None, :]
    same_block = q // pattern.block_size == k // pattern.block_size
    q_anchor = q % pattern.anchor_stride == pattern.anchor_offset
    k_anchor = k % pattern.anchor_stride == pattern.anchor_offset
    return same_block | q_anchor | k_anchor


def anchor_local_reference(
    q: Tensor, k: Tensor, v: Tensor, pattern: AnchorLocalPattern, *, q_start: int, scale: float
) -> Tensor:
    """Masked softmax attention, a few hundred query rows at a time, in the dtype of the inputs.

    Args:
        q: [batch, queries, heads, head_dim] in the caller's token order; its first row is token ``q_start``.
        k, v: [batch, tokens, kv_heads, head_dim]; heads is a multiple of kv_heads.

    Returns:
        [batch, queries, heads, head_dim], dtype of q.
    """
    group = q.shape[2] // k.shape[2]
    keys = k.repeat_interleave(group, dim=2)
    values = v.repeat_interleave(group, dim=2)
    k_positions = torch.arange(k.shape[1], device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for begin in range(0, q.shape[1], _ROWS_AT_ONCE):
        rows = q[:, begin : begin + _ROWS_AT_ONCE]
        positions = torch.arange(rows.shape[1], device=q.device) + q_start + begin
        scores = torch.einsum("bqhd,bkhd->bhqk", rows, keys) * scale
        scores = scores.masked_fill(~allowed(pattern, positions, k_positions), float("-inf"))
        out[:, begin : begin + _ROWS_AT_ONCE] = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)
    return out
