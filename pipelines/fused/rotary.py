"""RMS norm over all heads, with rotary embedding or without, where q and k lie.

Knows: the arithmetic of Diffusers' Wan attention: the norm is rounded before it is turned. Does not know:
layers. Tables are float32 [1, tokens, 1, head_dim], two alike for each pair of neighbouring channels, or
[1, tokens, 1, head_dim / 2].
"""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from pipelines.fused.norms import kernels_take


@torch.library.custom_op("reelwright::fused_norm_rotate_", mutates_args=("q", "k"))
def norm_rotate_(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    eps: float,
) -> None:
    """Norm and turn q and k [batch, tokens, channels], which share no memory; weights [channels]."""
    _norm_rotate(q, k, q_weight, k_weight, cos, sin, heads, eps)


@torch.library.custom_op("reelwright::fused_norm_rotate_joined_", mutates_args=("qkv",))
def norm_rotate_joined_(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    eps: float,
) -> None:
    """The same of the first two thirds of qkv [batch, tokens, 3 * channels]."""
    q, k, _ = qkv.chunk(3, dim=-1)
    _norm_rotate(q, k, q_weight, k_weight, cos, sin, heads, eps)


@torch.library.custom_op("reelwright::fused_rms_norm_", mutates_args=("x",))
def rms_norm_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Norm x [batch, tokens, channels]."""
    if kernels_take(x, weight):
        from pipelines.fused.kernels import rms_norm_triton

        rms_norm_triton(x, None, weight, None, None, None, 1, eps)
    else:
        x.copy_(rms_norm(x, x.shape[-1:], weight, eps))


def reference_norm_rotate(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> Tensor:
    """x [batch, tokens, channels], normed and turned, in plain PyTorch."""
    normed = rms_norm(x, x.shape[-1:], weight, eps)
    even, odd = normed.unflatten(2, (heads, -1, 2)).unbind(-1)
    if cos.shape[-1] != even.shape[-1]:
        cos, sin = cos[..., 0::2], sin[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(2).to(x.dtype)


def _norm_rotate(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    eps: float,
) -> None:
    dense = cos.is_contiguous() and sin.is_contiguous() and cos.shape[0] == 1
    if dense and kernels_take(q, k, q_weight, k_weight, cos, sin):
        from pipelines.fused.kernels import rms_norm_triton

        rms_norm_triton(q, k, q_weight, k_weight, cos, sin, heads, eps)
        return
    for x, weight in ((q, q_weight), (k, k_weight)):
        x.copy_(reference_norm_rotate(x, weight, cos, sin, heads, eps))
