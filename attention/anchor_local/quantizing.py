"""q, k and v in 8 bits, on the way to the fp8 kernel: Triton, in two passes over k and v and one over q.

q and k become int8, v becomes float8 e4m3, transposed. The first pass finds the mean of k's channels and the
largest values, the second one rounds. Each sum is added up in one order, so a clip comes out the same again.

Knows tensors and rounding. Does not know which token sees which.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.anchor_local.value_columns import ValueColumns

INT8_MOST = 127.0
E4M3_MOST = 448.0
_CHUNK = 512  # tokens of one program of the first pass
_ROWS = 64  # tokens of one step
# All zeros must not divide by zero, nor the product of the scales of q and k vanish.
_LEAST_PEAK = tl.constexpr(1e-15)
_LEAST_V_PEAK = tl.constexpr(1e-30)
_INT8_MOST = tl.constexpr(INT8_MOST)
_E4M3_MOST = tl.constexpr(E4M3_MOST)
_INF = tl.constexpr(float("inf"))


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """Attention's inputs in 8 bits; C is head_dim filled up with zeros to a power of two, at least 32.

    Attributes:
        q: int8 [batch, queries, heads, C]; a row is ``q * q_scale``.
        q_scale: float32 [batch, heads, queries].
        k: int8 [batch, tokens, kv_heads, C]; ``k * k_scale`` is the keys minus their mean over the tokens,
            which moves all scores of a query by one number and so changes no weight.
        k_scale: float32 [batch, kv_heads].
        v: float8_e4m3fn [batch, kv_heads, C, columns]; which column is whose, ``ValueColumns`` says.
        v_scale: float32 [batch, kv_heads, C].
    """

    q: Tensor
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor


@triton.jit
def _rows_of(
    source, row, rows_end, stride_row, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """float32 [ROWS, COLUMNS] and its mask; zero beyond the tensor."""
    rows = row + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    mask = (rows < rows_end)[:, None] & (columns < HEAD_DIM)[None, :]
    x = tl.load(source + rows.to(tl.int64)[:, None] * stride_row + columns[None, :], mask=mask, other=0.0)
    return x.to(tl.float32), mask


@triton.jit
def _to_int8(x):
    """Rounded to the nearest, halves up; x lies in -127 .. 127."""
    return tl.floor(x + 0.5).to(tl.int8)


@triton.jit
def to_e4m3(x, INTERPRETED: tl.constexpr):
    """float8 e4m3 of float32 within -448 .. 448, rounded to the nearest, halves to even."""
    if INTERPRETED:
        # The interpreter drops the carry of a rounding (Triton 3.9: 125 becomes 64); leave it none to do.
        bits = x.to(tl.int32, bitcast=True)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
        below = x + 24576.0 - 24576.0  # 1.5 * 2**14: adding it rounds to multiples of 2**-9
        x = tl.where(tl.abs(x) < 0.015625, below, normal.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


# A new length must not compile a new kernel. Strides of batch entries are specialised all the same, since
# without that loads are not known to be aligned: they are multiples of head_dim, at any length.
_TOKENS = ("tokens", "queries", "width_16", "chunks")


@triton.jit(do_not_specialize=[*_TOKENS, "kv_heads"])
def _peaks_kernel(
    k, v, peaks, tokens, kv_heads, chunks,
    k_stride_batch, k_stride_row, k_stride_head, v_stride_batch, v_stride_row, v_stride_head,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of each channel of one chunk: sum, smallest and largest of k, and largest absolute value of v."""
    chunk = tl.program_id(0)
    batch_head = tl.program_id(1)
    batch = (batch_head // kv_heads).to(tl.int64)
    head = (batch_head % kv_heads).to(tl.int64)
    k += batch * k_stride_batch + head * k_stride_head
    v += batch * v_stride_batch + head * v_stride_head
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    least = tl.full([COLUMNS], _INF, dtype=tl.float32)
    most = tl.full([COLUMNS], -_INF, dtype=tl.float32)
    v_most = tl.zeros([COLUMNS], dtype=tl.float32)
    for row in tl.range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, tokens), ROWS):
        keys, mask = _rows_of(k, row, tokens, k_stride_row, HEAD_DIM, COLUMNS, ROWS)
        values, _ = _rows_of(v, row, tokens, v_stride_row, HEAD_DIM, COLUMNS, ROWS)
        total += tl.sum(keys, 0)
        least = tl.minimum(least, tl.min(tl.where(mask, keys, _INF), 0))
        most = tl.maximum(most, tl.max(tl.where(mask, keys, -_INF), 0))
        v_most = tl.maximum(v_most, tl.max(tl.abs(values), 0))
    columns = tl.arange(0, COLUMNS)
    peaks += (batch_head.to(tl.int64) * chunks + chunk) * 4 * COLUMNS
    tl.store(peaks + columns, total)
    tl.store(peaks + COLUMNS + columns, least)
    tl.store(peaks + 2 * COLUMNS + columns, most)
    tl.store(peaks + 3 * COLUMNS + columns, v_most)


@triton.jit(do_not_specialize=[*_TOKENS])
def _scales_kernel(
    peaks, k_mean, k_scale, v_scale, tokens, chunks,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """From the chunks of one head to its mean of k and its scales."""
    batch_head = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    peaks += batch_head * chunks * 4 * COLUMNS
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    least = tl.full([COLUMNS], _INF, dtype=tl.float32)
    most = tl.full([COLUMNS], -_INF, dtype=tl.float32)
    v_most = tl.zeros([COLUMNS], dtype=tl.float32)
    for first in tl.range(0, chunks, CHUNKS_AT_ONCE):
        chunk = first + tl.arange(0, CHUNKS_AT_ONCE)
        mask = (chunk < chunks)[:, None]
        at = peaks + chunk[:, None] * 4 * COLUMNS + columns[None, :]
        total += tl.sum(tl.load(at, mask=mask, other=0.0), 0)
        least = tl.minimum(least, tl.min(tl.load(at + COLUMNS, mask=mask, other=_INF), 0))
        most = tl.maximum(most, tl.max(tl.load(at + 2 * COLUMNS, mask=mask, other=-_INF), 0))
        v_most = tl.maximum(v_most, tl.max(tl.load(at + 3 * COLUMNS, mask=mask, other=0.0), 0))
    mean = total / tokens.to(tl.float32)
    reach = tl.where(columns < HEAD_DIM, tl.maximum(most - mean, mean - least), 0.0)
    tl.store(k_mean + batch_head * COLUMNS + columns, mean)
    tl.store(k_scale + batch_head, tl.maximum(tl.max(reach, 0), _LEAST_PEAK) / _INT8_MOST)
    tl.store(v_scale + batch_head * COLUMNS + columns, tl.maximum(v_most, _LEAST_V_PEAK) / _E4M3_MOST)


@triton.jit(do_not_specialize=[*_TOKENS, "heads", "kv_heads"])
def _round_kernel(
    q, k, v, sources, k_mean, k_scale, v_scale, q_out, q_scale_out, k_out, v_out,
    queries, tokens, width_16, heads, kv_heads,
    q_stride_batch, q_stride_row, q_stride_head, k_stride_batch, k_stride_row, k_stride_head,
    v_stride_batch, v_stride_row, v_stride_head,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Some rows of one head of q, of k where there is one, and as many columns of v."""
    row = tl.program_id(0) * ROWS
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    rows = row + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    if row < queries:
        source = q + batch * q_stride_batch + head * q_stride_head
        x, _ = _rows_of(source, row, queries, q_stride_row, HEAD_DIM, COLUMNS, ROWS)
        scale = tl.maximum(tl.max(tl.abs(x), 1), _LEAST_PEAK) / _INT8_MOST
        at = ((batch * queries + rows) * heads + head) * COLUMNS
        tl.store(
            q_out + at[:, None] + columns[None, :],
            _to_int8(x / scale[:, None]),
            mask=(rows < queries)[:, None],
        )
        tl.store(q_scale_out + (batch * heads + head) * queries + rows, scale, mask=rows < queries)
    batch_head = batch * kv_heads + head
    if (head < kv_heads) & (row < tokens):
        source = k + batch * k_stride_batch + head * k_stride_head
        x, mask = _rows_of(source, row, tokens, k_stride_row, HEAD_DIM, COLUMNS, ROWS)
        # Beyond the tensor nothing is stored, but no number that fits no int8 may be made one there either.
        x = tl.where(mask, x - tl.load(k_mean + batch_head * COLUMNS + columns)[None, :], 0.0)
        at = ((batch * tokens + rows) * kv_heads + head) * COLUMNS
        # The division rounds: the largest value may come out a hair above 127, which rounds to 127.
        tl.store(
            k_out + at[:, None] + columns[None, :],
            _to_int8(x / tl.load(k_scale + batch_head)),
            mask=(rows < tokens)[:, None],
        )
    if head < kv_heads:
        token = tl.load(sources + rows, mask=rows < width_16 * 16, other=-1)
        at = v + batch * v_stride_batch + head * v_stride_head + token.to(tl.int64)[:, None] * v_stride_row
        mask = (token >= 0)[:, None] & (columns < HEAD_DIM)[None, :]
        x = tl.load(at + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        x = x / tl.load(v_scale + batch_head * COLUMNS + columns)[None, :]
        x = tl.maximum(x, -_E4M3_MOST, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, _E4M3_MOST, propagate_nan=tl.PropagateNan.ALL)
        # 16 times something, so that the compiler knows that stores are aligned.
        at = (batch_head * COLUMNS + columns)[:, None] * (width_16 * 16) + rows[None, :]
        tl.store(v_out + at, tl.trans(to_e4m3(x, INTERPRETED)), mask=(rows < width_16 * 16)[None, :])


def quantized(q: Tensor, k: Tensor, v: Tensor, values: ValueColumns) -> Quantized:
    """q [B, M, H, D] and k, v [B, N, KV, D] in 8 bits; their last dimension must be dense.

    int8 has an eighth of the error of e4m3 for numbers of one magnitude, which scores need; e4m3 holds all
    weights of a softmax, small ones too (docs/notes.md has the numbers).
    """
    batch, queries, heads, head_dim = q.shape
    tokens, kv_heads = k.shape[1:3]
    columns = max(32, triton.next_power_of_2(head_dim))
    chunks = -(-tokens // _CHUNK)
    device = q.device

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    result = Quantized(
        q=torch.empty(batch, queries, heads, columns, dtype=torch.int8, device=device),
        q_scale=floats(batch, heads, queries),
        k=torch.empty(batch, tokens, kv_heads, columns, dtype=torch.int8, device=device),
        k_scale=floats(batch, kv_heads),
        v=torch.empty(batch, kv_heads, columns, values.width, dtype=torch.float8_e4m3fn, device=device),
        v_scale=floats(batch, kv_heads, columns),
    )
    peaks, k_mean = floats(batch * kv_heads, chunks, 4, columns), floats(batch, kv_heads, columns)
    _peaks_kernel[(chunks, batch * kv_heads)](
        k, v, peaks, tokens, kv_heads, chunks, *k.stride()[:3], *v.stride()[:3],
        HEAD_DIM=head_dim, COLUMNS=columns, ROWS=_ROWS, CHUNK=_CHUNK, num_warps=8,
    )  # fmt: skip
    _scales_kernel[(batch * kv_heads,)](
        peaks, k_mean, result.k_scale, result.v_scale, tokens, chunks,
        HEAD_DIM=head_dim, COLUMNS=columns, CHUNKS_AT_ONCE=16,
    )  # fmt: skip
    _round_kernel[(-(-values.width // _ROWS), batch * heads)](
        q, k, v, values.sources, k_mean, result.k_scale, result.v_scale,
        result.q, result.q_scale, result.k, result.v,
        queries, tokens, values.width // 16, heads, kv_heads,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        HEAD_DIM=head_dim, COLUMNS=columns, ROWS=_ROWS, INTERPRETED=device.type == "cpu", num_warps=8,
    )  # fmt: skip
    return result
