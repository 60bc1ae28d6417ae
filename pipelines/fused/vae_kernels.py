"""Triton kernels over pixels of a video decoder: norm with activation, residual, upsampling.

Knows: rows of channels side by side, a stride between batches. Does not know: layers, or when a kernel is the
better way. A program holds ROWS whole rows, each in WIDTH columns, a power of two. Sums are float32.
"""

import triton
import triton.language as tl
from torch import Tensor

from pipelines.fused.vae_norm import EPS

_VALUES = 4096  # of a program
_WARPS = 4


@triton.jit
def _places(rows, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Columns, offsets of a program's values, and which of them there are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    return column, row[:, None] * COLUMNS + column[None, :], there


@triton.jit
def _of_channels(source, column, COLUMNS: tl.constexpr):
    return tl.load(source + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _norm_silu_kernel(
    out, x, shift, gamma, bias, out_stride, x_stride, rows, eps,
    SCALE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out = silu(normed * SCALE * gamma + bias) of x + shift. Program (rows, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    column, offset, there = _places(rows, COLUMNS, WIDTH, ROWS)
    a = tl.load(x + batch * x_stride + offset, mask=there, other=0.0).to(tl.float32)
    if shift is not None:
        a += _of_channels(shift, column, COLUMNS)
    length = tl.sqrt(tl.sum(a * a, 1))
    # What is not a number stays none, in all of its row.
    a /= tl.maximum(length, eps, propagate_nan=tl.PropagateNan.ALL)[:, None]
    a *= SCALE
    a *= _of_channels(gamma, column, COLUMNS)
    if bias is not None:
        a += _of_channels(bias, column, COLUMNS)
    a /= 1.0 + tl.exp(-a)
    tl.store(out + batch * out_stride + offset, a.to(out.dtype.element_ty), mask=there)


@triton.jit
def _add_kernel(
    x, shift, other, x_stride, other_stride, rows,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x += shift + other. Program (rows, batch)."""
    batch = tl.program_id(1).to(tl.int64)
    column, offset, there = _places(rows, COLUMNS, WIDTH, ROWS)
    x += batch * x_stride + offset
    a = tl.load(x, mask=there, other=0.0).to(tl.float32)
    if shift is not None:
        a += _of_channels(shift, column, COLUMNS)
    a += tl.load(other + batch * other_stride + offset, mask=there, other=0.0).to(tl.float32)
    tl.store(x, a.to(x.dtype.element_ty), mask=there)


@triton.jit
def _upsample_kernel(
    out, x, rows, height, width,
    FRAMES: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (rows, frame): those COLUMNS of pixels' channels that are of the frame, each to its square."""
    frame = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    there = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    values = tl.load(x + (row * FRAMES + frame)[:, None] * COLUMNS + column[None, :], mask=there)
    line = row // width
    place = row % width
    line = (line // height * FRAMES + frame) * height + line % height
    # The upper left one of four pixels.
    pixel = line * 2 * (2 * width) + 2 * place
    out += pixel[:, None] * COLUMNS + column[None, :]
    for down in tl.static_range(2):
        for right in tl.static_range(2):
            tl.store(out + (down * 2 * width + right) * COLUMNS, values, mask=there)


def norm_silu_triton(
    out: Tensor, x: Tensor, shift: Tensor | None, gamma: Tensor, bias: Tensor | None
) -> None:
    """Fills ``out``; both [batch, channels, frames, height, width], channels last, the rest [channels]."""
    if x.numel():
        batch, columns, rows = x.shape[0], x.shape[1], x[0, 0].numel()
        sizes = _sizes(columns)
        _norm_silu_kernel[(triton.cdiv(rows, sizes["ROWS"]), batch)](
            out,
            x,
            shift,
            gamma,
            bias,
            out.stride(0),
            x.stride(0),
            rows,
            EPS,
            SCALE=columns**0.5,
            COLUMNS=columns,
            **sizes,
            num_warps=_WARPS,
        )


def add_triton(x: Tensor, shift: Tensor | None, other: Tensor) -> None:
    """In place; x and other as above, shift [channels]."""
    if x.numel():
        batch, columns, rows = x.shape[0], x.shape[1], x[0, 0].numel()
        sizes = _sizes(columns)
        _add_kernel[(triton.cdiv(rows, sizes["ROWS"]), batch)](
            x,
            shift,
            other,
            x.stride(0),
            other.stride(0),
            rows,
            COLUMNS=columns,
            **sizes,
            num_warps=_WARPS,
        )


def upsample_triton(out: Tensor, x: Tensor, frames: int) -> None:
    """Fills ``out`` [batch * time * frames, channels, 2 height, 2 width], channels last, as ``upsample``.

    Of x [batch, frames * channels, time, height, width], all its pixels side by side, channels last.
    """
    batch, columns, time, height, width = x.shape
    if x.numel():
        rows = batch * time * height * width
        sizes = _sizes(columns // frames)
        _upsample_kernel[(triton.cdiv(rows, sizes["ROWS"]), frames)](
            out,
            x,
            rows,
            height,
            width,
            FRAMES=frames,
            COLUMNS=columns // frames,
            **sizes,
            num_warps=_WARPS,
        )


def _sizes(columns: int) -> dict[str, int]:
    width = triton.next_power_of_2(columns)
    return {"WIDTH": width, "ROWS": max(1, _VALUES // width)}
