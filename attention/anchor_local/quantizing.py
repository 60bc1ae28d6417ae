"""q, k and v in 8 bits, on the way to the fp8 kernel: Triton, in two passes over k and v and one over q.

q and k become int8, v becomes float8 e4m3, transposed. The first pass rounds q, and finds the mean of k's
channels and the largest values; the second one rounds k and v. Each sum is added up in one order, so a clip
comes out the same again.

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
# All zeros must not divide by zero, nor the product of the scales of q and k vanish.
_LEAST_PEAK = tl.constexpr(1e-15)
_LEAST_V_PEAK = tl.constexpr(1e-30)
_INT8_MOST = tl.constexpr(INT8_MOST)
_E4M3_MOST = tl.constexpr(E4M3_MOST)
_INF = tl.constexpr(float("inf"))
_LOADS = tl.constexpr(8)  # in one step of the first pass
# 1.5 * 2**23: float32 about it are whole numbers, whose lowest byte is that of what was added.
_WHOLE_NUMBERS = tl.constexpr(12582912.0)


@dataclass(frozen=True, slots=True)
class QuantizingConfig:
    """How the work is cut; the rows are multiples of 16 and powers of two.

    Attributes:
        peak_rows: tokens of one program of the first pass.
        rows: tokens that a program rounds at once.
        steps: how many times it does so.
        num_warps: of either kernel.
    """

    peak_rows: int
    rows: int
    steps: int
    num_warps: int


_CONFIG = QuantizingConfig(peak_rows=512, rows=64, steps=2, num_warps=8)
# Of few tokens and heads: more programs, so that each multiprocessor has some.
_SMALL = QuantizingConfig(peak_rows=128, rows=64, steps=1, num_warps=8)
_SMALL_ROWS = 1 << 17  # tokens times heads of k below which the second one is taken


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
    """float32 [ROWS, COLUMNS], zero beyond the tensor; not to be read again."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    mask = (row + rows < rows_end)[:, None] & (columns < HEAD_DIM)[None, :]
    at = (
        source
        + tl.cast(row, tl.int64) * stride_row
        + (rows.to(tl.int64)[:, None] * stride_row + columns[None, :])
    )
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _whole_rows_of(
    source, row, stride_row, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    """The same where all rows are there, which will be read again."""
    columns = tl.arange(0, COLUMNS)
    at = source + tl.cast(row, tl.int64) * stride_row
    at = at + (tl.arange(0, ROWS).to(tl.int64)[:, None] * stride_row + columns[None, :])
    x = tl.load(at) if HEAD_DIM == COLUMNS else tl.load(at, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    return x.to(tl.float32)


@triton.jit
def _to_int8(x):
    """Rounded to the nearest, halves to even; x lies in -127 .. 127."""
    return (x + _WHOLE_NUMBERS).to(tl.int32, bitcast=True).to(tl.int8)


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
_TOKENS = ("tokens", "queries", "width_16", "chunks", "q_programs", "kv_batch_heads", "groups", "copies")


@triton.jit
def _round_queries(
    q, q_out, q_scale, first_row, queries, heads, batch, head, stride_batch, stride_row, stride_head,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Some rows of one head of q in int8, each with its own scale."""
    q += batch * stride_batch + head * stride_head
    columns = tl.arange(0, COLUMNS)
    for row in tl.range(first_row, tl.minimum(first_row + ROWS * STEPS, queries), ROWS):
        x = _rows_of(q, row, queries, stride_row, HEAD_DIM, COLUMNS, ROWS)
        peak = tl.maximum(tl.max(tl.abs(x), 1), _LEAST_PEAK)
        rows = row + tl.arange(0, ROWS)
        at = ((batch * queries + row) * heads + head) * COLUMNS
        at = at + (tl.arange(0, ROWS)[:, None] * heads * COLUMNS + columns[None, :])
        narrow = _to_int8(x * (1.0 / peak * _INT8_MOST)[:, None])
        tl.store(q_out + at, narrow, mask=(rows < queries)[:, None])
        tl.store(q_scale + (batch * heads + head) * queries + rows, peak / _INT8_MOST, mask=rows < queries)


@triton.jit
def _peaks_of_keys(
    k, peaks, begin, end, stride_row,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """Of each channel of some rows: sum, smallest and largest, to float32 [3, COLUMNS]."""
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    least = tl.full([ROWS, COLUMNS], _INF, dtype=tl.float32)
    most = tl.full([ROWS, COLUMNS], -_INF, dtype=tl.float32)
    whole_end = begin + (end - begin) // (ROWS * LOADS) * (ROWS * LOADS)
    for row in tl.range(begin, whole_end, ROWS * LOADS):
        for load in tl.static_range(LOADS):
            x = _whole_rows_of(k, row + load * ROWS, stride_row, HEAD_DIM, COLUMNS, ROWS)
            total += x
            least = tl.minimum(least, x)
            most = tl.maximum(most, x)
    for row in tl.range(whole_end, end, ROWS):
        x = _rows_of(k, row, end, stride_row, HEAD_DIM, COLUMNS, ROWS)
        mask = (row + tl.arange(0, ROWS) < end)[:, None]
        total += x
        least = tl.minimum(least, tl.where(mask, x, _INF))
        most = tl.maximum(most, tl.where(mask, x, -_INF))
    columns = tl.arange(0, COLUMNS)
    tl.store(peaks + columns, tl.sum(total, 0))
    tl.store(peaks + COLUMNS + columns, tl.min(least, 0))
    tl.store(peaks + 2 * COLUMNS + columns, tl.max(most, 0))


@triton.jit
def _peaks_of_values(
    v, peaks, begin, end, stride_row,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """Of each channel of some rows the largest absolute value, to float32 [COLUMNS]."""
    most = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    whole_end = begin + (end - begin) // (ROWS * LOADS) * (ROWS * LOADS)
    for row in tl.range(begin, whole_end, ROWS * LOADS):
        for load in tl.static_range(LOADS):
            x = _whole_rows_of(v, row + load * ROWS, stride_row, HEAD_DIM, COLUMNS, ROWS)
            most = tl.maximum(most, tl.abs(x))
    for row in tl.range(whole_end, end, ROWS):
        most = tl.maximum(most, tl.abs(_rows_of(v, row, end, stride_row, HEAD_DIM, COLUMNS, ROWS)))
    tl.store(peaks + tl.arange(0, COLUMNS), tl.max(most, 0))


@triton.jit
def _is_last(arrived, chunks):
    """Have all other chunks of this head stored their peaks?"""
    tl.debug_barrier()  # the stores of all threads come before the one addition
    return tl.atomic_add(arrived, 1) == chunks - 1


# Peaks that other programs stored are read past the first-level cache.
@triton.jit
def _scale_of_keys(
    peaks, k_mean, k_scale, k_factor, tokens, chunks,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """From the chunks of one head of k to its mean and scale."""
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros([CHUNKS_AT_ONCE, COLUMNS], dtype=tl.float32)
    least = tl.full([CHUNKS_AT_ONCE, COLUMNS], _INF, dtype=tl.float32)
    most = tl.full([CHUNKS_AT_ONCE, COLUMNS], -_INF, dtype=tl.float32)
    for first in tl.range(0, chunks, CHUNKS_AT_ONCE):
        chunk = first + tl.arange(0, CHUNKS_AT_ONCE)
        mask = (chunk < chunks)[:, None]
        at = peaks + chunk[:, None] * 3 * COLUMNS + columns[None, :]
        total += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        least = tl.minimum(least, tl.load(at + COLUMNS, mask=mask, other=_INF, cache_modifier=".cg"))
        most = tl.maximum(most, tl.load(at + 2 * COLUMNS, mask=mask, other=-_INF, cache_modifier=".cg"))
    mean = tl.sum(total, 0) / tokens.to(tl.float32)
    reach = tl.maximum(tl.max(most, 0) - mean, mean - tl.min(least, 0))
    reach = tl.where(columns < HEAD_DIM, reach, 0.0)
    tl.store(k_mean + columns, mean)
    scale = tl.maximum(tl.max(reach, 0), _LEAST_PEAK) / _INT8_MOST
    tl.store(k_scale, scale)
    tl.store(k_factor, tl.div_rn(1.0, scale))


@triton.jit
def _scale_of_values(peaks, v_scale, v_factor, chunks, COLUMNS: tl.constexpr, CHUNKS_AT_ONCE: tl.constexpr):
    """From the chunks of one head of v to the scales of its channels."""
    columns = tl.arange(0, COLUMNS)
    most = tl.zeros([CHUNKS_AT_ONCE, COLUMNS], dtype=tl.float32)
    for first in tl.range(0, chunks, CHUNKS_AT_ONCE):
        chunk = first + tl.arange(0, CHUNKS_AT_ONCE)
        at = peaks + chunk[:, None] * COLUMNS + columns[None, :]
        most = tl.maximum(most, tl.load(at, mask=(chunk < chunks)[:, None], other=0.0, cache_modifier=".cg"))
    scale = tl.maximum(tl.max(most, 0), _LEAST_V_PEAK) / _E4M3_MOST
    tl.store(v_scale + columns, scale)
    tl.store(v_factor + columns, tl.div_rn(1.0, scale))


@triton.jit(do_not_specialize=[*_TOKENS, "heads", "kv_heads"])
def _peaks_kernel(
    q, k, v, q_out, q_scale, k_peaks, v_peaks, arrived, k_mean, k_scale, k_factor, v_scale, v_factor,
    queries, tokens, heads, kv_heads, chunks, q_programs, kv_batch_heads,
    q_stride_batch, q_stride_row, q_stride_head, k_stride_batch, k_stride_row, k_stride_head,
    v_stride_batch, v_stride_row, v_stride_head,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    PEAK_ROWS: tl.constexpr, LOAD_ROWS: tl.constexpr,
):  # fmt: skip
    """Rounds q; finds mean and scale of k and scales of v. Neighbours are programs of the same tokens.

    The program that comes last to a head makes its scales, from all chunks in order, whichever it is.
    """
    program = tl.program_id(0)
    if program < q_programs:
        head = (program % heads).to(tl.int64)
        rest = program // heads
        programs_of_batch = (queries + ROWS * STEPS - 1) // (ROWS * STEPS)
        batch = (rest // programs_of_batch).to(tl.int64)
        _round_queries(
            q, q_out, q_scale, rest % programs_of_batch * (ROWS * STEPS), queries, heads, batch, head,
            q_stride_batch, q_stride_row, q_stride_head, HEAD_DIM, COLUMNS, ROWS, STEPS,
        )  # fmt: skip
    else:
        program -= q_programs
        chunk = program // (2 * kv_batch_heads)
        item = program % (2 * kv_batch_heads)
        is_value = item // kv_batch_heads
        batch_head = (item % kv_batch_heads).to(tl.int64)
        batch = batch_head // kv_heads
        head = batch_head % kv_heads
        begin = chunk * PEAK_ROWS
        end = tl.minimum(begin + PEAK_ROWS, tokens)
        if is_value == 0:
            k += batch * k_stride_batch + head * k_stride_head
            k_peaks += batch_head * chunks * 3 * COLUMNS
            _peaks_of_keys(
                k,
                k_peaks + chunk * 3 * COLUMNS,
                begin,
                end,
                k_stride_row,
                HEAD_DIM,
                COLUMNS,
                LOAD_ROWS,
                _LOADS,
            )
            if _is_last(arrived + item, chunks):
                _scale_of_keys(
                    k_peaks, k_mean + batch_head * COLUMNS, k_scale + batch_head, k_factor + batch_head,
                    tokens, chunks, HEAD_DIM, COLUMNS, 2 * LOAD_ROWS,
                )  # fmt: skip
        else:
            v += batch * v_stride_batch + head * v_stride_head
            v_peaks += batch_head * chunks * COLUMNS
            _peaks_of_values(
                v, v_peaks + chunk * COLUMNS, begin, end, v_stride_row, HEAD_DIM, COLUMNS, LOAD_ROWS, _LOADS
            )
            if _is_last(arrived + item, chunks):
                v_scale += batch_head * COLUMNS
                v_factor += batch_head * COLUMNS
                _scale_of_values(v_peaks, v_scale, v_factor, chunks, COLUMNS, 2 * LOAD_ROWS)


@triton.jit
def _round_keys(
    k, k_mean, k_factor, k_out, first_row, tokens, kv_heads, batch, head, stride_row,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Some rows of one head of k, without their mean, in int8."""
    columns = tl.arange(0, COLUMNS)
    mean = tl.load(k_mean + columns)
    factor = tl.load(k_factor)
    for row in tl.range(first_row, tl.minimum(first_row + ROWS * STEPS, tokens), ROWS):
        x = _rows_of(k, row, tokens, stride_row, HEAD_DIM, COLUMNS, ROWS)
        at = ((batch * tokens + row) * kv_heads + head) * COLUMNS
        at = at + (tl.arange(0, ROWS)[:, None] * kv_heads * COLUMNS + columns[None, :])
        mask = (row + tl.arange(0, ROWS) < tokens)[:, None]
        # The largest value may come out a hair above 127, which rounds to 127.
        tl.store(k_out + at, _to_int8((x - mean[None, :]) * factor), mask=mask)


@triton.jit
def _round_values(
    v, sources, v_factor, v_out, first_column, tokens, width, stride_row,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    LOAD_ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Some columns of one head of the transposed v in e4m3."""
    columns = tl.arange(0, COLUMNS)
    factor = tl.load(v_factor + columns)
    # A thread loads 16 bytes of each LOAD_ROWS-th row of the tile. Which tokens these rows are is chosen so
    # that a thread holds neighbours, which its registers transpose: shared memory moves words, not bytes.
    EACH: tl.constexpr = ROWS // LOAD_ROWS
    index = tl.arange(0, ROWS)
    order = index % LOAD_ROWS * EACH + index // LOAD_ROWS
    for column in tl.range(first_column, tl.minimum(first_column + ROWS * STEPS, width), ROWS):
        token = column + order  # the first columns are all tokens
        source = tl.load(sources + token, mask=(token >= tokens) & (token < width), other=-1)
        token = tl.where(token < tokens, token, source)
        mask = (token >= 0)[:, None] & (columns < HEAD_DIM)[None, :]
        at = v + token.to(tl.int64)[:, None] * stride_row + columns[None, :]
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        # The largest value may come out a hair above 448, which rounds to 448.
        x = to_e4m3(x * factor[None, :], INTERPRETED)
        x = tl.reshape(tl.permute(tl.reshape(x, [EACH, LOAD_ROWS, COLUMNS]), (1, 0, 2)), [ROWS, COLUMNS])
        at = v_out + column + (columns.to(tl.int64)[:, None] * width + index[None, :])
        tl.store(at, tl.trans(x), mask=(column + index < width)[None, :])


@triton.jit(do_not_specialize=[*_TOKENS, "kv_heads"])
def _round_kernel(
    k, v, sources, k_mean, k_factor, v_factor, k_out, v_out,
    tokens, width_16, kv_heads, kv_batch_heads, groups, copies,
    k_stride_batch, k_stride_row, k_stride_head, v_stride_batch, v_stride_row, v_stride_head,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    LOAD_ROWS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Rounds k and v. What the first pass read last is first: it is in the cache still.

    A group of programs has the rows of k, the columns of v of about the same tokens, and those of the further
    copies of v.
    """
    program = tl.program_id(0)
    batch_head = (program % kv_batch_heads).to(tl.int64)
    rest = program // kv_batch_heads
    group = groups - 1 - rest // (1 + copies)
    part = rest % (1 + copies)
    batch = batch_head // kv_heads
    head = batch_head % kv_heads
    if part == 0:
        k += batch * k_stride_batch + head * k_stride_head
        _round_keys(
            k, k_mean + batch_head * COLUMNS, k_factor + batch_head, k_out, group * (ROWS * STEPS), tokens,
            kv_heads, batch, head, k_stride_row, HEAD_DIM, COLUMNS, ROWS, STEPS,
        )  # fmt: skip
    else:
        v += batch * v_stride_batch + head * v_stride_head
        width = width_16 * 16  # so that the compiler knows that stores are aligned
        v_out += batch_head * COLUMNS * width
        first_column = ((part - 1) * groups + group) * (ROWS * STEPS)
        _round_values(
            v, sources, v_factor + batch_head * COLUMNS, v_out, first_column, tokens, width, v_stride_row,
            HEAD_DIM, COLUMNS, ROWS, STEPS, LOAD_ROWS, INTERPRETED,
        )  # fmt: skip


def quantized(
    q: Tensor, k: Tensor, v: Tensor, values: ValueColumns, config: QuantizingConfig | None = None
) -> Quantized:
    """q [B, M, H, D] and k, v [B, N, KV, D] in 8 bits; their last dimension must be dense.

    int8 has an eighth of the error of e4m3 for numbers of one magnitude, which scores need; e4m3 holds all
    weights of a softmax, small ones too (docs/notes.md has the numbers).
    """
    batch, queries, heads, head_dim = q.shape
    tokens, kv_heads = k.shape[1:3]
    columns = max(32, triton.next_power_of_2(head_dim))
    device = q.device
    if config is None:
        config = _SMALL if batch * tokens * kv_heads < _SMALL_ROWS else _CONFIG

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
    k_mean, k_factor, v_factor = (floats(batch, kv_heads, last) for last in (columns, 1, columns))
    chunks = triton.cdiv(tokens, config.peak_rows)
    kv_batch_heads = batch * kv_heads
    step_rows = config.rows * config.steps
    q_programs = batch * heads * triton.cdiv(queries, step_rows)
    load_rows = min(config.rows, config.num_warps * 32 * 8 // columns)  # 16 bytes a thread
    shared: dict[str, int] = {
        "HEAD_DIM": head_dim,
        "COLUMNS": columns,
        "ROWS": config.rows,
        "STEPS": config.steps,
        "LOAD_ROWS": load_rows,
        "num_warps": config.num_warps,
    }
    _peaks_kernel[(q_programs + 2 * kv_batch_heads * chunks,)](
        q, k, v, result.q, result.q_scale,
        floats(kv_batch_heads, chunks, 3, columns), floats(kv_batch_heads, chunks, columns),
        torch.zeros(2 * kv_batch_heads, dtype=torch.int32, device=device),
        k_mean, result.k_scale, k_factor, result.v_scale, v_factor,
        queries, tokens, heads, kv_heads, chunks, q_programs, kv_batch_heads,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], PEAK_ROWS=config.peak_rows, **shared,
    )  # fmt: skip
    copies = max(1, round(values.width / tokens))
    groups = triton.cdiv(max(tokens, triton.cdiv(values.width, copies)), step_rows)
    _round_kernel[(kv_batch_heads * groups * (1 + copies),)](
        k, v, values.sources, k_mean, k_factor, v_factor, result.k, result.v,
        tokens, values.width // 16, kv_heads, kv_batch_heads, groups, copies,
        *k.stride()[:3], *v.stride()[:3], INTERPRETED=device.type == "cpu", **shared,
    )  # fmt: skip
    return result
