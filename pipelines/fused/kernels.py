"""Triton kernels over rows of channels: residual with layer norm, and RMS norm with rotary embedding.

Knows: rows and strides. Does not know: layers, or when a kernel is the better way. A program holds one row in
registers, in two parts whose sizes are powers of two: FIRST columns, and what is left of COLUMNS within REST.
Sums are float32. What a product in fp8 takes next is stored as that takes it.
"""

import triton
import triton.language as tl
from torch import Tensor

from pipelines.row_kernels import store_quantised


@triton.jit
def _row(source, FIRST: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr):
    """Both parts of a row, float32; zeros beyond its end."""
    rest = FIRST + tl.arange(0, REST)
    first = tl.load(source + tl.arange(0, FIRST))
    return first.to(tl.float32), tl.load(source + rest, mask=rest < COLUMNS, other=0.0).to(tl.float32)


@triton.jit
def _store_row(target, first, rest, FIRST: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr):
    columns = FIRST + tl.arange(0, REST)
    tl.store(target + tl.arange(0, FIRST), first.to(target.dtype.element_ty))
    tl.store(target + columns, rest.to(target.dtype.element_ty), mask=columns < COLUMNS)


@triton.jit
def _modulation(
    source, table, INDEX: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr
):
    """Row INDEX of a token's modulation, with the block's own table added if there is one."""
    first, rest = _row(source + INDEX * COLUMNS, FIRST, REST, COLUMNS)
    if table is not None:
        more, more_rest = _row(table + INDEX * COLUMNS, FIRST, REST, COLUMNS)
        first += more
        rest += more_rest
    return first, rest


@triton.jit
def _add_norm_kernel(
    x, hidden, summed, normed, scales, weight, bias, modulation, table, stride_batch, stride_token, eps,
    GATE: tl.constexpr, SHIFT: tl.constexpr,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """summed = hidden + gate * x, and normed = its layer norm with weight and bias or with modulation.

    Program (token, batch). What is None is left out; GATE and SHIFT are rows of the modulation, -1: none. The
    scale is the row after the shift. With scales, one for each row, normed is e4m3 to be multiplied by them.
    """
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    index = batch * tl.num_programs(0) + token
    row = index * COLUMNS
    if modulation is not None:
        modulation += batch * stride_batch + token * stride_token
    a, b = _row(x + row, FIRST, REST, COLUMNS)
    if hidden is not None:
        h, h_rest = _row(hidden + row, FIRST, REST, COLUMNS)
        if GATE >= 0:
            gate, gate_rest = _modulation(modulation, table, GATE, FIRST, REST, COLUMNS)
            a *= gate
            b *= gate_rest
        a += h
        b += h_rest
        _store_row(summed + row, a, b, FIRST, REST, COLUMNS)
        # The norm is of what was stored.
        a = a.to(summed.dtype.element_ty).to(tl.float32)
        b = b.to(summed.dtype.element_ty).to(tl.float32)
    if normed is not None:
        mean = (tl.sum(a, 0) + tl.sum(b, 0)) / COLUMNS
        a -= mean
        b = tl.where(FIRST + tl.arange(0, REST) < COLUMNS, b - mean, 0.0)
        scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / COLUMNS + eps)
        a *= scale
        b *= scale
        if weight is not None:
            w, w_rest = _row(weight, FIRST, REST, COLUMNS)
            a *= w
            b *= w_rest
        if bias is not None:
            w, w_rest = _row(bias, FIRST, REST, COLUMNS)
            a += w
            b += w_rest
        if SHIFT >= 0:
            w, w_rest = _modulation(modulation, table, SHIFT + 1, FIRST, REST, COLUMNS)
            a *= 1.0 + w
            b *= 1.0 + w_rest
            w, w_rest = _modulation(modulation, table, SHIFT, FIRST, REST, COLUMNS)
            a += w
            b += w_rest
        if scales is not None:
            # Of the norm as it would be stored otherwise.
            dtype = x.dtype.element_ty if hidden is None else hidden.dtype.element_ty
            a = a.to(dtype).to(tl.float32)
            b = b.to(dtype).to(tl.float32)
            store_quantised(normed + row, scales + index, a, b, FIRST, REST, COLUMNS)
        else:
            _store_row(normed + row, a, b, FIRST, REST, COLUMNS)


@triton.jit
def _rotated(
    x, cos, sin, BEGIN: tl.constexpr, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, TABLE_STEP: tl.constexpr
):
    """Neighbouring columns of x [SIZE], which begin at BEGIN, turned by the angles of a token's tables."""
    even, odd = tl.split(tl.reshape(x, [SIZE // 2, 2]))
    pair = (BEGIN // 2 + tl.arange(0, SIZE // 2)) % (HEAD_DIM // 2)
    c = tl.load(cos + pair * TABLE_STEP).to(tl.float32)
    s = tl.load(sin + pair * TABLE_STEP).to(tl.float32)
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [SIZE])


@triton.jit
def _rms_norm_row(
    source, a, b, weight, cos, sin, eps,
    HEAD_DIM: tl.constexpr, TABLE_STEP: tl.constexpr,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Stores the norm of a row, whose parts are a and b, and turns it if there are tables."""
    scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / COLUMNS + eps)
    w, w_rest = _row(weight, FIRST, REST, COLUMNS)
    a *= scale * w
    b *= scale * w_rest
    if cos is not None:
        # As the norm would store them.
        a = a.to(source.dtype.element_ty).to(tl.float32)
        b = b.to(source.dtype.element_ty).to(tl.float32)
        a = _rotated(a, cos, sin, 0, FIRST, HEAD_DIM, TABLE_STEP)
        b = _rotated(b, cos, sin, FIRST, REST, HEAD_DIM, TABLE_STEP)
    _store_row(source, a, b, FIRST, REST, COLUMNS)


@triton.jit
def _rms_norm_kernel(
    q, k, q_weight, k_weight, cos, sin,
    q_stride_batch, q_stride_token, k_stride_batch, k_stride_token, eps,
    HEAD_DIM: tl.constexpr, TABLE_STEP: tl.constexpr,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """RMS norm of all heads' channels, and rotary embedding, of one token's q and k, in place."""
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    if cos is not None:
        cos += token * (HEAD_DIM // 2 * TABLE_STEP)
        # Of tables with two alike for each pair, Diffusers takes the first cosine and the second sine.
        sin += token * (HEAD_DIM // 2 * TABLE_STEP) + TABLE_STEP - 1
    q += batch * q_stride_batch + token * q_stride_token
    a, b = _row(q, FIRST, REST, COLUMNS)
    if k is not None:
        k += batch * k_stride_batch + token * k_stride_token
        c, d = _row(k, FIRST, REST, COLUMNS)
        _rms_norm_row(k, c, d, k_weight, cos, sin, eps, HEAD_DIM, TABLE_STEP, COLUMNS, FIRST, REST)
    _rms_norm_row(q, a, b, q_weight, cos, sin, eps, HEAD_DIM, TABLE_STEP, COLUMNS, FIRST, REST)


def add_norm_triton(
    x: Tensor,
    hidden: Tensor | None,
    summed: Tensor | None,
    normed: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: Tensor | None,
    table: Tensor | None,
    gate: int,
    shift: int,
    eps: float,
    scales: Tensor | None = None,
    num_warps: int | None = None,
) -> None:
    """Fills ``summed`` (which may be ``hidden``) and ``normed``; all [batch, tokens, channels], dense.

    With ``scales``, float32 [batch * tokens, 1], which are filled, ``normed`` is e4m3.
    ``modulation`` is [batch, tokens or 1, rows, channels] with dense rows, ``table`` [rows, channels].
    """
    batch, tokens, columns = x.shape
    strides = (0, 0)
    if modulation is not None:
        strides = (modulation.stride(0), modulation.stride(1) if modulation.shape[1] > 1 else 0)
    if x.numel():
        _add_norm_kernel[(tokens, batch)](
            x,
            hidden,
            summed,
            normed,
            scales,
            weight,
            bias,
            modulation,
            table,
            *strides,
            eps,
            GATE=gate,
            SHIFT=shift,
            COLUMNS=columns,
            **_parts(columns),
            num_warps=num_warps or _warps(columns),
        )


def rms_norm_triton(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: int,
    eps: float,
    num_warps: int | None = None,
) -> None:
    """In place; q and k [batch, tokens, channels] with dense rows, the rest as ``rotary.norm_rotate_``."""
    batch, tokens, columns = q.shape
    head_dim = columns // heads
    if q.numel():
        _rms_norm_kernel[(tokens, batch)](
            q,
            k,
            q_weight,
            k_weight,
            cos,
            sin,
            q.stride(0),
            q.stride(1),
            0 if k is None else k.stride(0),
            0 if k is None else k.stride(1),
            eps,
            HEAD_DIM=head_dim,
            TABLE_STEP=1 if cos is None else cos.shape[-1] * 2 // head_dim,
            COLUMNS=columns,
            **_parts(columns),
            num_warps=num_warps or _warps(columns),
        )


def _parts(columns: int) -> dict[str, int]:
    first = 1 << (columns.bit_length() - 1)
    # At least a pair, which the rotary embedding needs.
    return {"FIRST": first, "REST": max(2, triton.next_power_of_2(max(columns - first, 1)))}


def _warps(columns: int) -> int:
    return 8 if columns > 4096 else 4 if columns > 512 else 1
