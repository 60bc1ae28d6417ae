"""What storing cached rows in FP8 or FP4 does to them, simulated: values are rounded, dtypes stay.

A block of channels shares a scale, the least power of two with which all of them fit the narrow type.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Quantization = Literal["fp8", "fp4"]

FP8_BLOCK, FP4_BLOCK = 64, 32
_FP8_MOST, _FP4_MOST = 448.0, 6.0
_FP8_LEAST_PEAK = 1e-4  # blocks below it get the scale of this
_FP4_LEAST_PEAK = _FP4_MOST * 2.0**-126


def through_fp8(x: Tensor) -> Tensor:
    """x as e4m3 holds it, in blocks of 64 of the last dimension."""
    blocks, scale = _scaled(x, FP8_BLOCK, _FP8_MOST, _FP8_LEAST_PEAK)
    # Through float32, the only wide type with a rounding to e4m3 everywhere.
    rounded = blocks.float().to(torch.float8_e4m3fn).to(blocks.dtype)
    return (rounded * scale).flatten(-2).to(x.dtype)


def through_fp4(x: Tensor) -> Tensor:
    """x as e2m1 holds it, in blocks of 32 of the last dimension, rounded half to even."""
    blocks, scale = _scaled(x, FP4_BLOCK, _FP4_MOST, _FP4_LEAST_PEAK)
    # Steps are 0.5 up to 2, 1 up to 4 and 2 up to 6. frexp gives 1 for values from 1 to 2.
    step: Tensor = torch.ldexp(torch.ones_like(blocks), blocks.frexp().exponent.clamp(1, 3) - 2)
    rounded = (blocks / step).round() * step
    return (rounded * scale).flatten(-2).to(x.dtype)


def hadamard(x: Tensor) -> Tensor:
    """x times the orthonormal Hadamard matrix (Sylvester's order); the last dimension is a power of two."""
    size = x.shape[-1]
    out = x.to(torch.promote_types(x.dtype, torch.float32))
    half = 1
    while half < size:
        first, second = out.unflatten(-1, (-1, 2, half)).unbind(-2)
        out = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        half *= 2
    return (out / math.sqrt(size)).to(x.dtype)


def _scaled(x: Tensor, block: int, most: float, least_peak: float) -> tuple[Tensor, Tensor]:
    """Blocks [..., blocks, block] over their scales, none above ``most``; and the scales."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, block))
    peak = wide.abs().amax(-1, keepdim=True).clamp_min(least_peak)
    mantissa, exponent = (peak / most).frexp()
    scale = torch.ldexp(torch.ones_like(peak), exponent - (mantissa == 0.5).int())
    return (wide / scale).clamp(-most, most), scale
