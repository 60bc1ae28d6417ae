"""window_sink as one Triton kernel over packed sequences.

One program does one tile of queries of one head. It finds its sequence in ``cu_seqlens`` on the device, so
the host needs no value of it, and visits only the key tiles that one of its rows sees: the global keys, then
those behind them that the window touches; of either first the tiles that all rows see whole, without a mask,
then those at the edges. A window in single tokens without globals compiles to a kernel that knows no others.

Both kinds of sinks are where the online softmax starts, and cost the loops nothing: a null logit is a row
maximum with weight one and no value; a biased key 0 is a row maximum with weight one and that key's value,
and the loops begin behind it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.choice import is_data_center_gpu
from attention.triton_dot import dot
from attention.triton_tiles import LARGEST_SINK
from attention.window_sink.sinks import Sinks
from attention.window_sink.window import Bounds, Window

_LOG2_E = tl.constexpr(1.4426950408889634)
# Where a row's maximum starts: below every score, yet finite, so that a tile in which a row sees nothing
# leaves -inf - _LOWEST = -inf, a weight of zero, and never -inf - -inf.
_LOWEST = tl.constexpr(-3.0e38)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Shape of the work of one program: query rows, key rows per loop step, warps and pipeline stages.

    With fewer than ``fewest_inner`` tiles that need no mask, those share the loop of the tiles that do: two
    short loops wait for memory twice.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    fewest_inner: int = 2


# Fixed per architecture, dtype width and head_dim, so that no request ever waits for tuning. Tiles are small:
# a band of 64 rows and (64, 64) keys is three tiles of 64, 1.5 times the pairs needed; 128 rows need 2 times.
# Hopper's rows 64 and 128 were measured on an H200 (benchmarks/window.py --tune), the others chosen by that
# count and by shared memory (99 KiB on Ada and consumer Ampere).
_HOPPER = {
    32: TileConfig(64, 64, 4, 3),
    64: TileConfig(64, 64, 4, 2, fewest_inner=1),
    128: TileConfig(64, 64, 4, 3),
    256: TileConfig(64, 64, 8, 2),
}
_OTHER = {
    32: TileConfig(64, 64, 4, 3),
    64: TileConfig(64, 64, 4, 3),
    128: TileConfig(64, 64, 4, 2),
    256: TileConfig(64, 32, 8, 2),
}
# Windows of whole latent frames and their like. Hopper's row 128 was measured on an H200 with frames of 1,560
# and 3,600 tokens; the others are shapes that anchor_local runs well with.
_WIDE_KEYS = 1024
_HOPPER_WIDE = {
    32: TileConfig(128, 64, 4, 3),
    64: TileConfig(128, 64, 4, 3),
    128: TileConfig(128, 128, 8, 3),
    256: TileConfig(128, 64, 8, 2),
}
_OTHER_WIDE = {
    32: TileConfig(128, 64, 4, 3),
    64: TileConfig(128, 64, 4, 3),
    128: TileConfig(128, 64, 8, 2),
    256: TileConfig(64, 32, 8, 2),
}
_FLOAT32 = {
    32: TileConfig(32, 32, 4, 2),
    64: TileConfig(32, 32, 4, 2),
    128: TileConfig(32, 32, 8, 2),
    256: TileConfig(32, 16, 8, 2),
}


@triton.jit
def _sequence_of(cu_seqlens, slot, sequences, BLOCK_M: tl.constexpr):
    """The sequence whose tile this slot is. Sequence s has the slots from cu_seqlens[s] // BLOCK_M + s on.

    Those are enough for it, and at most one more than it needs.
    """
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // BLOCK_M + middle <= slot:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _load_rows(source, rows, rows_end, stride_row, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """[rows, COLUMNS] of one head, zero from rows_end on and beyond HEAD_DIM."""
    columns = tl.arange(0, COLUMNS)
    mask = (rows < rows_end)[:, None] & (columns < HEAD_DIM)[None, :]
    return tl.load(source + rows[:, None] * stride_row + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _softmax_step(
    q, k_source, v_source, key, keys_end, k_stride_row, v_stride_row, acc, row_max, row_sum, scale_log2,
    row_begin, row_end, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax (base 2, float32) over keys key .. key + BLOCK_N - 1.

    MASKED: a row sees only those within row_begin .. row_end.
    """
    rows = key + tl.arange(0, BLOCK_N)
    keys = _load_rows(k_source, rows, keys_end, k_stride_row, HEAD_DIM, COLUMNS)
    values = _load_rows(v_source, rows, keys_end, v_stride_row, HEAD_DIM, COLUMNS)
    scores = dot(q, keys.T, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32), INTERPRETED)
    if MASKED:
        seen = (rows[None, :] >= row_begin[:, None]) & (rows[None, :] <= row_end[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    weights = tl.math.exp2(scores * scale_log2 - new_max[:, None])
    decay = tl.math.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = dot(weights.to(values.dtype), values, acc, INTERPRETED)
    return acc, new_max, row_sum


@triton.jit
def _walk(
    q, k_source, v_source, begin, end, all_begin, all_end, k_stride_row, v_stride_row, acc, row_max, row_sum,
    scale_log2, row_begin, row_end, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, FEWEST_INNER: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys begin .. end - 1, of which every row sees all_begin .. all_end - 1."""
    # Tiles inner_first .. inner_end - 1, counted from begin, hold only keys that every row sees.
    tiles = tl.cdiv(end - begin, BLOCK_N)
    inner_begin = tl.maximum(all_begin, begin)
    inner_first = tl.minimum(tl.cdiv(inner_begin - begin, BLOCK_N), tiles)
    inner_end = tl.maximum((all_end - begin) // BLOCK_N, inner_first)
    inner_end = tl.where(inner_end - inner_first < FEWEST_INNER, inner_first, inner_end)
    for tile in tl.range(inner_first, inner_end):
        acc, row_max, row_sum = _softmax_step(
            q, k_source, v_source, begin + tile * BLOCK_N, end, k_stride_row, v_stride_row,
            acc, row_max, row_sum, scale_log2, row_begin, row_end,
            HEAD_DIM, COLUMNS, BLOCK_M, BLOCK_N, False, INTERPRETED,
        )  # fmt: skip
    inner_tiles = inner_end - inner_first
    for edge in tl.range(0, tiles - inner_tiles):
        tile = tl.where(edge < inner_first, edge, edge + inner_tiles)
        acc, row_max, row_sum = _softmax_step(
            q, k_source, v_source, begin + tile * BLOCK_N, end, k_stride_row, v_stride_row,
            acc, row_max, row_sum, scale_log2, row_begin, row_end,
            HEAD_DIM, COLUMNS, BLOCK_M, BLOCK_N, True, INTERPRETED,
        )  # fmt: skip
    return acc, row_max, row_sum


# A new length must not compile a new kernel, so no number is specialised. What 16-byte loads must know of the
# strides, that they are multiples of 8 elements, they learn from STRIDE_UNIT.
_STRIDES = tuple(f"{tensor}_stride_{axis}" for tensor in ("q", "k", "v", "out") for axis in ("row", "head"))
_WINDOW = ("left", "right", "unit", "global_keys", "global_queries", "ahead")


@triton.jit
def _sink_of(sinks, head):
    """A head's logit, of powers of two."""
    return tl.minimum(tl.maximum(tl.load(sinks + head), -LARGEST_SINK), LARGEST_SINK) * _LOG2_E


@triton.jit(do_not_specialize=["tokens", "sequences", *_WINDOW, "heads", "group", *_STRIDES])
def _window_sink_kernel(
    q_source, k_source, v_source, out, cu_seqlens, sinks, scale_log2,
    tokens, sequences, left, right, unit, global_keys, global_queries, ahead, heads, group,
    q_stride_row, q_stride_head, k_stride_row, k_stride_head,
    v_stride_row, v_stride_head, out_stride_row, out_stride_head,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    FEWEST_INNER: tl.constexpr, PLAIN: tl.constexpr, SINK_MODE: tl.constexpr, STRIDE_UNIT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    # int64 before any product: 2^31 elements is 524,288 tokens of 32 heads of 128.
    q_stride_row = q_stride_row.to(tl.int64) * STRIDE_UNIT
    q_stride_head = q_stride_head.to(tl.int64) * STRIDE_UNIT
    k_stride_row = k_stride_row.to(tl.int64) * STRIDE_UNIT
    k_stride_head = k_stride_head.to(tl.int64) * STRIDE_UNIT
    v_stride_row = v_stride_row.to(tl.int64) * STRIDE_UNIT
    v_stride_head = v_stride_head.to(tl.int64) * STRIDE_UNIT
    out_stride_row = out_stride_row.to(tl.int64) * STRIDE_UNIT
    out_stride_head = out_stride_head.to(tl.int64) * STRIDE_UNIT
    # Heads are innermost: programs that run together read the same rows of memory and share key heads.
    program = tl.program_id(0)
    head = (program % heads).to(tl.int64)
    kv_head = head // group
    slot = program // heads
    sequence = _sequence_of(cu_seqlens, slot, sequences, BLOCK_M)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = (tl.minimum(tl.load(cu_seqlens + sequence + 1), tokens) - start).to(tl.int32)
    first = (slot - sequence - start // BLOCK_M).to(tl.int32) * BLOCK_M
    if first >= length:
        return
    q_source += start * q_stride_row + head * q_stride_head
    k_source += start * k_stride_row + kv_head * k_stride_head
    v_source += start * v_stride_row + kv_head * v_stride_head
    out += start * out_stride_row + head * out_stride_head

    rows = first + tl.arange(0, BLOCK_M)
    q = _load_rows(q_source, rows, length, q_stride_row, HEAD_DIM, COLUMNS)
    # Rows behind the sequence see what its last row sees: no row is empty, and none of those is stored.
    positions = tl.minimum(rows, length - 1)
    last = tl.minimum(first + BLOCK_M, length) - 1
    if PLAIN:
        row_begin = positions - left
        row_end = tl.minimum(positions + right, length - 1)
        begin = tl.maximum(first - left, 0)
        end = tl.minimum(last + right + 1, length)
        all_begin = last - left
        all_end = tl.minimum(first + right + 1, length)
    else:
        sees_all = positions < global_queries
        row_begin = tl.where(sees_all, 0, (positions // unit - left) * unit)
        row_end = tl.where(sees_all, length - 1, (positions // unit + right + 1) * unit - 1)
        row_end = tl.minimum(tl.minimum(row_end, positions + ahead), length - 1)
        begin = tl.maximum(tl.min(row_begin, 0), 0)
        end = tl.max(row_end, 0) + 1
        all_begin = tl.max(row_begin, 0)
        all_end = tl.min(row_end, 0) + 1

    acc = tl.zeros([BLOCK_M, COLUMNS], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], _LOWEST, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    if SINK_MODE == "null_logit":
        row_max = tl.zeros([BLOCK_M], dtype=tl.float32) + _sink_of(sinks, head)
        row_sum += 1.0
    first_key = 0
    if SINK_MODE == "key0_bias":
        sees_key_0 = begin == 0 if PLAIN else (begin == 0) | (global_keys > 0)
        if sees_key_0:
            columns = tl.arange(0, COLUMNS)
            key = tl.load(k_source + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32)
            value = tl.load(v_source + columns, mask=columns < HEAD_DIM, other=0.0).to(tl.float32)
            score = tl.sum(q.to(tl.float32) * key[None, :], 1) * scale_log2 + _sink_of(sinks, head)
            seen = row_begin <= 0
            if not PLAIN:
                seen = seen | (global_keys > 0)
            row_max = tl.where(seen, score, row_max)
            row_sum = tl.where(seen, 1.0, row_sum)
            acc = tl.where(seen[:, None], value[None, :], acc)
            first_key += 1

    if not PLAIN:
        # The global keys that some row sees, and those that all see: they differ if there is a causal rule.
        globals_end = tl.minimum(global_keys, tl.minimum(length, last + ahead + 1))
        globals_for_all = tl.minimum(globals_end, first + ahead + 1)
        acc, row_max, row_sum = _walk(
            q, k_source, v_source, first_key, globals_end, 0, globals_for_all, k_stride_row, v_stride_row,
            acc, row_max, row_sum, scale_log2, positions * 0, tl.minimum(positions + ahead, globals_end - 1),
            HEAD_DIM, COLUMNS, BLOCK_M, BLOCK_N, FEWEST_INNER, INTERPRETED,
        )  # fmt: skip
        begin = tl.maximum(begin, global_keys)
        end = tl.maximum(end, begin)
    begin = tl.maximum(begin, first_key)
    acc, row_max, row_sum = _walk(
        q, k_source, v_source, begin, end, all_begin, all_end, k_stride_row, v_stride_row,
        acc, row_max, row_sum, scale_log2, row_begin, row_end,
        HEAD_DIM, COLUMNS, BLOCK_M, BLOCK_N, FEWEST_INNER, INTERPRETED,
    )  # fmt: skip

    acc = acc / row_sum[:, None]
    columns = tl.arange(0, COLUMNS)
    tl.store(
        out + rows[:, None] * out_stride_row + columns[None, :],
        acc.to(out.dtype.element_ty),
        mask=(rows < length)[:, None] & (columns < HEAD_DIM)[None, :],
    )


def window_sink_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window: Window,
    scale: float,
    sinks: Sinks | None,
    config: TileConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of packed q [N, H, D] over k, v [N, KV, D]; returns [N, H, D]. Nothing waits for the device.

    The last dimension must be dense; other strides are free.
    """
    tokens, heads, head_dim = q.shape
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    sequences = cu_seqlens.numel() - 1
    if tokens == 0:
        return out
    columns = max(16, triton.next_power_of_2(head_dim))
    bounds = window.within(tokens)
    if config is None:
        config = tile_config(q.dtype, columns, is_data_center_gpu(q.device), wide=_is_wide(bounds, tokens))
    strides = [stride for x in (q, k, v, out) for stride in x.stride()[:2]]
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    _window_sink_kernel[((tokens // config.block_m + sequences) * heads,)](
        q,
        k,
        v,
        out,
        cu_seqlens.contiguous(),
        None if sinks is None else sinks.logits.contiguous(),
        scale * _LOG2_E.value,
        tokens,
        sequences,
        bounds.left,
        bounds.right,
        bounds.unit,
        bounds.global_keys,
        bounds.global_queries,
        0 if bounds.causal else tokens,
        heads,
        heads // k.shape[1],
        *(stride // unit for stride in strides),
        HEAD_DIM=head_dim,
        COLUMNS=columns,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        FEWEST_INNER=config.fewest_inner,
        PLAIN=bounds.is_plain,
        SINK_MODE=None if sinks is None else sinks.mode,
        STRIDE_UNIT=unit,
        INTERPRETED=q.device.type == "cpu",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def _is_wide(bounds: Bounds, tokens: int) -> bool:
    """Whether most tiles that a program visits lie inside the window, so that large ones waste little."""
    keys = min((bounds.left + bounds.right + 1) * bounds.unit, tokens) + bounds.global_keys
    return not bounds.is_plain and keys >= _WIDE_KEYS


def tile_config(dtype: torch.dtype, columns: int, hopper: bool, wide: bool = False) -> TileConfig:
    """Tiles for heads padded to this many columns, a power of two."""
    width = max(32, columns)
    if dtype == torch.float32:
        return _FLOAT32[width]
    if wide:
        return (_HOPPER_WIDE if hopper else _OTHER_WIDE)[width]
    return (_HOPPER if hopper else _OTHER)[width]
