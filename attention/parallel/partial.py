"""Attention over a part of the keys, and results over all of them made from such parts.

Knows: PyTorch's fused attention operators that return the log-sum-exp of the scores, too.
Does not know: ranks.
"""

import torch
from torch import Tensor

from attention.choice import is_data_center_gpu

_CUDNN_MAX_HEAD_DIM = 128


def partial_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Softmax attention of q [B, M, H, D] over k, v [B, N, H, D], ready to be merged.

    Returns:
        [B, M, H, D + e], dtype of q: the result, and behind it, as e elements, the bits of the log-sum-exp
        of the row's scores (float32; float64 if q is).
    """
    out, lse = _with_lse(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale)
    lse = lse.reshape(*out.shape[:2], -1)[:, :, : q.shape[1]]  # some operators pad the rows
    bits = lse.contiguous().unsqueeze(-1).view(q.dtype)
    return torch.cat([out, bits], dim=-1).transpose(1, 2)


def merged(parts: Tensor, head_dim: int) -> Tensor:
    """One result from [parts, ..., D + e] of ``partial_attention`` over disjoint keys; [..., D].

    With z = log-sum-exp: sum_i exp(z_i - max z) out_i / sum_i exp(z_i - max z), in the precision of z.
    """
    exact = torch.float64 if parts.dtype == torch.float64 else torch.float32
    lse = parts[..., head_dim:].contiguous().view(exact)
    weights = (lse - lse.amax(0)).exp()
    out: Tensor = (parts[..., :head_dim].to(exact) * weights).sum(0) / weights.sum(0)
    return out.to(parts.dtype)


def _with_lse(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[B, H, M, D] and [B, H, at least M] (perhaps with a last dimension of 1)."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)
    elif q.dtype not in (torch.bfloat16, torch.float16):
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
    elif is_data_center_gpu(q.device) and q.shape[-1] <= _CUDNN_MAX_HEAD_DIM:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    return out, lse
