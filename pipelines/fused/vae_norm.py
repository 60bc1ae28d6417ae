"""What lies between the convolutions of Wan's video decoder, as single operators.

Knows: pictures [batch, channels, frames, height, width], best with channels last, and the arithmetic of
Diffusers' ``WanRMS_norm``: float32 inside, rounded once. Does not know: layers, or past frames.
"""

import torch
from torch import Tensor
from torch.nn.functional import interpolate, silu

EPS = 1e-12  # of torch's ``normalize``
_KERNELS_KNOW = (torch.bfloat16, torch.float16, torch.float32)


@torch.library.custom_op("reelwright::vae_norm_silu_", mutates_args=("out",))
def norm_silu_(out: Tensor, x: Tensor, shift: Tensor | None, gamma: Tensor, bias: Tensor | None) -> None:
    """out becomes silu(norm(x + shift) * gamma + bias), the norm over channels; the latter are [channels]."""
    if _kernels_take(out, x):
        from pipelines.fused.vae_kernels import norm_silu_triton

        norm_silu_triton(out, x, shift, gamma, bias)
        return
    # A frame after the other: float32 copies of 16-bit pictures stay small.
    for target, frame in zip(out.unbind(2), x.unbind(2), strict=True):
        _reference_norm_silu(target, frame, shift, gamma, bias)


@torch.library.custom_op("reelwright::vae_add_", mutates_args=("x",))
def add_(x: Tensor, shift: Tensor | None, other: Tensor) -> None:
    """x becomes x + shift + other; shift is [channels]."""
    if _kernels_take(x, other):
        from pipelines.fused.vae_kernels import add_triton

        add_triton(x, shift, other)
        return
    if shift is not None:
        x += _of_channels(shift, x)
    x += other


@torch.library.custom_op("reelwright::vae_upsample", mutates_args=())
def upsample(x: Tensor, frames: int) -> Tensor:
    """[batch, frames * channels, time, height, width] -> [batch * time * frames, channels, both sides twice].

    Of each place in time come ``frames`` frames, which lie in its channels; each value fills a square.
    """
    if _kernels_take(x) and x.is_contiguous(memory_format=torch.channels_last_3d):
        from pipelines.fused.vae_kernels import upsample_triton

        out: Tensor = _empty_upsampled(x, frames)
        upsample_triton(out, x, frames)
        return out
    apart = x.unflatten(1, (frames, -1)).permute(0, 3, 1, 2, 4, 5).flatten(0, 2)
    apart = apart.contiguous(memory_format=torch.channels_last)
    scaled: Tensor = interpolate(apart, scale_factor=(2.0, 2.0), mode="nearest-exact")
    return scaled


@upsample.register_fake
def _empty_upsampled(x: Tensor, frames: int) -> Tensor:
    batch, channels, time, height, width = x.shape
    shape = batch * time * frames, channels // frames, 2 * height, 2 * width
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _reference_norm_silu(
    out: Tensor, x: Tensor, shift: Tensor | None, gamma: Tensor, bias: Tensor | None
) -> None:
    """In plain PyTorch, of one frame; no copies where the numbers are wide already."""
    wide = torch.promote_types(x.dtype, torch.float32)
    work = out if out.dtype == wide else torch.empty_like(x, dtype=wide)
    work.copy_(x)
    if shift is not None:
        work += _of_channels(shift, work)
    work /= torch.linalg.vector_norm(work, dim=1, keepdim=True).clamp_min_(EPS)
    work *= x.shape[1] ** 0.5
    work *= _of_channels(gamma, work)
    if bias is not None:
        work += _of_channels(bias, work)
    silu(work, inplace=True)
    if work is not out:
        out.copy_(work)


def _of_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).view(-1, *(1,) * (like.ndim - 2))


def _kernels_take(*pictures: Tensor) -> bool:
    """Whether these are a GPU's, each with all its pixels side by side, channels last, of a known dtype."""
    return all(_is_of_gpu(x) and x.dtype in _KERNELS_KNOW and _has_dense_rows(x) for x in pictures)


def _is_of_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _has_dense_rows(x: Tensor) -> bool:
    return x[:1].permute(0, 2, 3, 4, 1).is_contiguous()
