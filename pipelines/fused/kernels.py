"""Triton kernels over rows of channels: residual with layer norm, and RMS norm with rotary embedding.

Knows: rows and strides. Does not know: layers, or when a kernel is the better way. A program holds ROWS rows
in registers, in two parts whose sizes are powers of two: FIRST columns, and what is left of COLUMNS within
REST. Sums are float32. What a product in fp8 takes next is stored as that takes it.
"""

import triton
import triton.language as tl
from torch import Tensor

from pipelines.row_kernels import store_quantised

_OF_ONE_WARP = 2048  # columns


@triton.jit
def _rows(source, at, there, FIRST: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr):
    """Both parts of rows that begin at ``at``, float32; zeros beyond their end, and for those not there."""
    begin, there = at[:, None], there[:, None]
    rest = FIRST + tl.arange(0, REST)[None, :]
    first = tl.load(source + begin + tl.arange(0, FIRST)[None, :], mask=there, other=0.0)
    last = tl.load(source + begin + rest, mask=there & (rest < COLUMNS), other=0.0)
    return first.to(tl.float32), last.to(tl.float32)


@triton.jit
def _one_row(source, FIRST: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr):
    """The same of one row, which is there."""
    at = tl.zeros([1], tl.int32)
    return _rows(source, at, at == 0, FIRST, REST, COLUMNS)


@triton.jit
def _store_rows(
    target, at, there, first, rest, FIRST: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr
):
    begin, there = at[:, None], there[:, None]
    columns = FIRST + tl.arange(0, REST)[None, :]
    dtype = target.dtype.element_ty
    tl.store(target + begin + tl.arange(0, FIRST)[None, :], first.to(dtype), mask=there)
    tl.store(target + begin + columns, rest.to(dtype), mask=there & (columns < COLUMNS))


@triton.jit
def _modulation(
    source, table, at, there,
    INDEX: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Row INDEX of each token's modulation, with the block's own table added if there is one."""
    first, rest = _rows(source + INDEX * COLUMNS, at, there, FIRST, REST, COLUMNS)
    if table is not None:
        more, more_rest = _one_row(table + INDEX * COLUMNS, FIRST, REST, COLUMNS)
        first += more
        rest += more_rest
    return first, rest


@triton.jit
def _sum(a, b):
    """Of each row."""
    return (tl.sum(a, 1) + tl.sum(b, 1))[:, None]


@triton.jit(do_not_specialize=["tokens"])
def _add_norm_kernel(
    x, hidden, summed, normed, scales, weight, bias, modulation, table,
    stride_batch, stride_token, tokens, eps,
    GATE: tl.constexpr, SHIFT: tl.constexpr, OF_TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """summed = hidden + gate * x, and normed = its layer norm with weight and bias or with modulation.

    Program (ROWS tokens, batch). What is None is left out; GATE and SHIFT are rows of the modulation, -1:
    none; each token has its own if OF_TOKENS. The scale is the row after the shift. With scales, one for each
    row, normed is e4m3 to be multiplied by them.
    """
    batch = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = token < tokens
    index = batch * tokens + token
    row = index * COLUMNS
    if modulation is not None:
        modulation += batch * stride_batch
    if OF_TOKENS:
        at, known = token * stride_token, there
    else:
        at = tl.zeros([1], tl.int64)
        known = at == 0
    a, b = _rows(x, row, there, FIRST, REST, COLUMNS)
    if hidden is not None:
        h, h_rest = _rows(hidden, row, there, FIRST, REST, COLUMNS)
        if GATE >= 0:
            gate, gate_rest = _modulation(modulation, table, at, known, GATE, FIRST, REST, COLUMNS)
            a *= gate
            b *= gate_rest
        a += h
        b += h_rest
        _store_rows(summed, row, there, a, b, FIRST, REST, COLUMNS)
        # The norm is of what was stored.
        a = a.to(summed.dtype.element_ty).to(tl.float32)
        b = b.to(summed.dtype.element_ty).to(tl.float32)
    if normed is not None:
        mean = _sum(a, b) / COLUMNS
        a -= mean
        b = tl.where(FIRST + tl.arange(0, REST)[None, :] < COLUMNS, b - mean, 0.0)
        scale = tl.rsqrt(_sum(a * a, b * b) / COLUMNS + eps)
        a *= scale
        b *= scale
        if weight is not None:
            w, w_rest = _one_row(weight, FIRST, REST, COLUMNS)
            a *= w
            b *= w_rest
        if bias is not None:
            w, w_rest = _one_row(bias, FIRST, REST, COLUMNS)
            a += w
            b += w_rest
        if SHIFT >= 0:
            w, w_rest = _modulation(modulation, table, at, known, SHIFT + 1, FIRST, REST, COLUMNS)
            a *= 1.0 + w
            b *= 1.0 + w_rest
            w, w_rest = _modulation(modulation, table, at, known, SHIFT, FIRST, REST, COLUMNS)
            a += w
            b += w_rest
        if scales is not None:
            # Of the norm as it would be stored otherwise.
            dtype = x.dtype.element_ty if hidden is None else hidden.dtype.element_ty
            a = a.to(dtype).to(tl.float32)
            b = b.to(dtype).to(tl.float32)
            store_quantised(normed, scales, index, there, a, b, FIRST, REST, COLUMNS)
        else:
            _store_rows(normed, row, there, a, b, FIRST, REST, COLUMNS)


@triton.jit
def _rotated(
    x, cos, sin, at, there,
    BEGIN: tl.constexpr, HEAD_DIM: tl.constexpr, TABLE_STEP: tl.constexpr,
):  # fmt: skip
    """Neighbouring columns of x, which begin at BEGIN, turned by the angles of each row's token."""
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, [ROWS, SIZE // 2, 2]))
    pair = (BEGIN // 2 + tl.arange(0, SIZE // 2)) % (HEAD_DIM // 2)
    places = at[:, None] + (pair * TABLE_STEP)[None, :]
    c = tl.load(cos + places, mask=there[:, None], other=0.0).to(tl.float32)
    s = tl.load(sin + places, mask=there[:, None], other=0.0).to(tl.float32)
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [ROWS, SIZE])


@triton.jit
def _rms_norm_rows(
    source, row, there, a, b, weight, cos, sin, at, eps,
    HEAD_DIM: tl.constexpr, TABLE_STEP: tl.constexpr,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Stores the norm of rows, whose parts are a and b, and turns it if there are tables."""
    scale = tl.rsqrt(_sum(a * a, b * b) / COLUMNS + eps)
    w, w_rest = _one_row(weight, FIRST, REST, COLUMNS)
    a *= scale * w
    b *= scale * w_rest
    if cos is not None:
        # As the norm would store them.
        a = a.to(source.dtype.element_ty).to(tl.float32)
        b = b.to(source.dtype.element_ty).to(tl.float32)
        a = _rotated(a, cos, sin, at, there, 0, HEAD_DIM, TABLE_STEP)
        b = _rotated(b, cos, sin, at, there, FIRST, HEAD_DIM, TABLE_STEP)
    _store_rows(source, row, there, a, b, FIRST, REST, COLUMNS)


@triton.jit(do_not_specialize=["tokens"])
def _rms_norm_kernel(
    q, k, q_weight, k_weight, cos, sin,
    q_stride_batch, q_stride_token, k_stride_batch, k_stride_token, tokens, eps,
    HEAD_DIM: tl.constexpr, TABLE_STEP: tl.constexpr,
    COLUMNS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """RMS norm of all heads' channels, and rotary embedding, of ROWS tokens' q and k, in place."""
    batch = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = token < tokens
    at = token * (HEAD_DIM // 2 * TABLE_STEP)
    if cos is not None:
        # Of tables with two alike for each pair, Diffusers takes the first cosine and the second sine.
        sin += TABLE_STEP - 1
    row = batch * q_stride_batch + token * q_stride_token
    a, b = _rows(q, row, there, FIRST, REST, COLUMNS)
    if k is not None:
        k_row = batch * k_stride_batch + token * k_stride_token
        c, d = _rows(k, k_row, there, FIRST, REST, COLUMNS)
        _rms_norm_rows(
            k, k_row, there, c, d, k_weight, cos, sin, at, eps, HEAD_DIM, TABLE_STEP, COLUMNS, FIRST, REST
        )
    _rms_norm_rows(
        q, row, there, a, b, q_weight, cos, sin, at, eps, HEAD_DIM, TABLE_STEP, COLUMNS, FIRST, REST
    )


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
        sizes = _sizes(columns, quantises=scales is not None)
        _add_norm_kernel[(triton.cdiv(tokens, sizes["ROWS"]), batch)](
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
            tokens,
            eps,
            GATE=gate,
            SHIFT=shift,
            OF_TOKENS=strides[1] > 0,
            COLUMNS=columns,
            **sizes,
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
) -> None:
    """In place; q and k [batch, tokens, channels] with dense rows, the rest as ``rotary.norm_rotate_``."""
    batch, tokens, columns = q.shape
    head_dim = columns // heads
    if q.numel():
        sizes = _sizes(columns)
        _rms_norm_kernel[(triton.cdiv(tokens, sizes["ROWS"]), batch)](
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
            tokens,
            eps,
            HEAD_DIM=head_dim,
            TABLE_STEP=1 if cos is None else cos.shape[-1] * 2 // head_dim,
            COLUMNS=columns,
            **sizes,
        )


def _sizes(columns: int, *, quantises: bool = False) -> dict[str, int]:
    """Of a row's parts, how many rows a program has, and its warps: fastest on an H200 (docs/notes.md)."""
    first = 1 << (columns.bit_length() - 1)
    return {
        "FIRST": first,
        # At least a pair, which the rotary embedding needs.
        "REST": max(2, triton.next_power_of_2(max(columns - first, 1))),
        "ROWS": 2 if quantises else 1,
        "num_warps": 1 if columns <= _OF_ONE_WARP else 4,
    }
