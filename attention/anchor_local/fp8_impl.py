"""anchor_local in 8 bits as one Triton kernel over ordered tokens: what ``precision="fp8"`` runs.

Scores are int8 products, weights and values float8 e4m3, sums and softmax float32. The walk over the keys is
that of ``triton_impl.py``. A loop step multiplies the weights of the tile before with its values, so that
this product runs while the softmax of this tile is computed.

Knows quantised tensors, the number of anchors and segments. Does not know how anything was quantised.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.anchor_local.quantizing import Quantized, quantized, to_e4m3
from attention.anchor_local.tile_table import tile_table
from attention.anchor_local.value_columns import value_columns
from attention.layout import AnchorLocalLayout
from attention.triton_tiles import LOG2_E, TileConfig, large_tiles

# By channels, and fixed as for the other kernel, so that no request waits for tuning. Nothing was measured on
# Ada: its tiles are the ones that spill least.
_HOPPER = {
    32: TileConfig(64, 128, 4, 3),
    64: TileConfig(64, 128, 4, 3),
    128: TileConfig(64, 128, 4, 3),
    256: TileConfig(64, 64, 4, 2),
}
_ADA = {
    32: TileConfig(64, 64, 4, 2),
    64: TileConfig(64, 64, 4, 2),
    128: TileConfig(64, 64, 8, 2),
    256: TileConfig(32, 32, 8, 2),
}
# Weights lie in 0 .. 1; times this most of them are normal numbers of e4m3, whose largest is 448.
_WEIGHT_BITS = tl.constexpr(8.0)


@triton.jit
def _rows_tile(
    source,
    batch_row,
    row,
    rows_end,
    column,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """int8 [ROWS, COLUMNS] of q or k, zero beyond the tensor."""
    if TMA:
        tile = source.load([batch_row + row, column])
    else:
        rows = row + tl.arange(0, ROWS)
        at = source + rows.to(tl.int64)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
        tile = tl.load(at, mask=(rows < rows_end)[:, None], other=0)
    return tile


@triton.jit
def _values_tile(
    source, channel, token, width, COLUMNS: tl.constexpr, TOKENS: tl.constexpr, TMA: tl.constexpr
):
    """e4m3 [COLUMNS, TOKENS] of the transposed v, zero beyond the tensor."""
    if TMA:
        tile = source.load([channel, token])
    else:
        tokens = token + tl.arange(0, TOKENS)
        at = source + tl.arange(0, COLUMNS).to(tl.int64)[:, None] * width + tokens[None, :]
        tile = tl.load(at, mask=(tokens < width)[None, :], other=0.0)
    return tile


@triton.jit
def _scores(q, key, INTERPRETED: tl.constexpr):
    """float32 q @ key.T, exact: sums of 256 products of int8 need 22 bits."""
    if INTERPRETED:
        scores = tl.dot(q.to(tl.float32), key.T.to(tl.float32))
    else:
        scores = tl.dot(q, key.T, out_dtype=tl.int32).to(tl.float32)
    return scores


@triton.jit
def _weighted(weights, value, acc, INTERPRETED: tl.constexpr):
    """acc + weights @ value.T in e4m3."""
    weights = to_e4m3(weights, INTERPRETED)
    if INTERPRETED:
        acc = tl.dot(weights.to(tl.float32), value.T.to(tl.float32), acc)
    else:
        acc = tl.dot(weights, value.T, acc)
    return acc


@triton.jit
def _softmax(scores, row_scale, row_max, row_sum):
    """Online softmax in base 2: weights << _WEIGHT_BITS, decay of earlier sums, new maximum and sum."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * row_scale)
    weights = tl.math.exp2(scores * row_scale[:, None] - (new_max - _WEIGHT_BITS)[:, None])
    decay = tl.math.exp2(row_max - new_max)
    return weights, decay, new_max, row_sum * decay + tl.sum(weights, 1)


_LENGTHS = ("queries", "tokens", "width", "anchors", "anchor_tiles", "segment_tiles", "batch_heads")


@triton.jit(do_not_specialize=[*_LENGTHS, "out_stride_batch", "heads", "kv_heads"])
def _fp8_kernel(
    q_source, k_source, v_source, q_scale, k_scale, v_scale, out, tiles, scale_log2,
    queries, tokens, width, anchors, anchor_tiles, segment_tiles, heads, kv_heads,
    out_stride_batch, out_stride_row, out_stride_head, batch_heads,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    anchor_programs = anchor_tiles * batch_heads
    if program < anchor_programs:
        batch_head = program // anchor_tiles
        tile = program % anchor_tiles
    else:
        batch_head = (program - anchor_programs) // segment_tiles
        tile = anchor_tiles + (program - anchor_programs) % segment_tiles
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // (heads // kv_heads)
    kv_batch_head = batch * kv_heads + kv_head
    begin = tl.load(tiles + tile * 5)
    end = tl.load(tiles + tile * 5 + 1)
    key_begin = tl.load(tiles + tile * 5 + 2)
    key_end = tl.load(tiles + tile * 5 + 3)
    first_count = anchors
    if program < anchor_programs:
        first_count = tokens

    q_batch_row, kv_batch_row, channel = 0, 0, 0
    if TMA:
        q_batch_row = batch * queries
        kv_batch_row = batch * tokens
        channel = kv_batch_head * COLUMNS
    else:
        q_source += (batch.to(tl.int64) * queries * heads + head) * COLUMNS
        k_source += (batch.to(tl.int64) * tokens * kv_heads + kv_head) * COLUMNS
        v_source += kv_batch_head.to(tl.int64) * COLUMNS * width
    q_column, k_column = head * COLUMNS, kv_head * COLUMNS
    q_stride, k_stride = heads * COLUMNS, kv_heads * COLUMNS

    rows = begin + tl.arange(0, BLOCK_M)
    row_scale = tl.load(q_scale + batch_head.to(tl.int64) * queries + rows, mask=rows < queries, other=1.0)
    row_scale = row_scale * tl.load(k_scale + kv_batch_head) * scale_log2
    q = _rows_tile(q_source, q_batch_row, begin, queries, q_column, q_stride, BLOCK_M, COLUMNS, TMA)
    acc = tl.zeros([BLOCK_M, COLUMNS], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    # The first step has no weights yet: zeros, times the first tile's values.
    weights = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    decay = tl.full([BLOCK_M], 1.0, dtype=tl.float32)

    first_rows = first_count // BLOCK_N * BLOCK_N
    second_rows = (key_end - key_begin) // BLOCK_N * BLOCK_N
    whole_rows = first_rows + second_rows
    # From the end of the first range to the second one; of v there is a second copy for it.
    jump = key_begin - first_rows
    value_jump = tl.load(tiles + tile * 5 + 4) - first_rows
    for start in tl.range(0, whole_rows, BLOCK_N):
        row = start + tl.where(start < first_rows, 0, jump)
        key = _rows_tile(k_source, kv_batch_row, row, tokens, k_column, k_stride, BLOCK_N, COLUMNS, TMA)
        last = tl.maximum(start - BLOCK_N, 0)
        last_column = last + tl.where(last < first_rows, 0, value_jump)
        value = _values_tile(v_source, channel, last_column, width, COLUMNS, BLOCK_N, TMA)
        scores = _scores(q, key, INTERPRETED)
        acc = _weighted(weights, value, acc * decay[:, None], INTERPRETED)
        weights, decay, row_max, row_sum = _softmax(scores, row_scale, row_max, row_sum)
    if whole_rows > 0:
        last = whole_rows - BLOCK_N
        last_column = last + tl.where(last < first_rows, 0, value_jump)
        value = _values_tile(v_source, channel, last_column, width, COLUMNS, BLOCK_N, TMA)
        acc = _weighted(weights, value, acc * decay[:, None], INTERPRETED)
    first_rest = first_count - first_rows
    if first_rest > 0:
        key = _rows_tile(
            k_source, kv_batch_row, first_rows, tokens, k_column, k_stride, BLOCK_N, COLUMNS, TMA
        )
        value = _values_tile(v_source, channel, first_rows, width, COLUMNS, BLOCK_N, TMA)
        scores = _scores(q, key, INTERPRETED)
        scores = tl.where((tl.arange(0, BLOCK_N) < first_rest)[None, :], scores, float("-inf"))
        weights, decay, row_max, row_sum = _softmax(scores, row_scale, row_max, row_sum)
        acc = _weighted(weights, value, acc * decay[:, None], INTERPRETED)
    second_rest = key_end - key_begin - second_rows
    if second_rest > 0:
        row = key_begin + second_rows
        key = _rows_tile(k_source, kv_batch_row, row, tokens, k_column, k_stride, BLOCK_N, COLUMNS, TMA)
        value = _values_tile(v_source, channel, value_jump + whole_rows, width, COLUMNS, BLOCK_N, TMA)
        scores = _scores(q, key, INTERPRETED)
        scores = tl.where((tl.arange(0, BLOCK_N) < second_rest)[None, :], scores, float("-inf"))
        weights, decay, row_max, row_sum = _softmax(scores, row_scale, row_max, row_sum)
        acc = _weighted(weights, value, acc * decay[:, None], INTERPRETED)

    columns = tl.arange(0, COLUMNS)
    acc = acc / row_sum[:, None] * tl.load(v_scale + kv_batch_head * COLUMNS + columns)[None, :]
    out += batch.to(tl.int64) * out_stride_batch + head.to(tl.int64) * out_stride_head
    tl.store(
        out + rows[:, None].to(tl.int64) * out_stride_row + columns[None, :],
        acc.to(out.dtype.element_ty),
        mask=(rows < end)[:, None] & (columns < HEAD_DIM)[None, :],
    )


def anchor_local_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnchorLocalLayout,
    scale: float,
    config: TileConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of ordered q [B, M, H, D] over ordered k, v [B, N, KV, D]; shape and dtype of q."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    return attend_quantized(
        quantized(q, k, v, value_columns(layout, q.device)), q, layout, scale, config, out
    )


def attend_quantized(
    narrow: Quantized,
    q: Tensor,
    layout: AnchorLocalLayout,
    scale: float,
    config: TileConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The same on quantised tensors; of q only shape and dtype count."""
    batch, queries, heads, head_dim = q.shape
    tokens, kv_heads, columns = narrow.k.shape[1:]
    width = narrow.v.shape[3]
    use_tma = large_tiles(q.device)
    config = config or (_HOPPER if use_tma else _ADA)[columns]
    tiles, anchor_tiles = _tiles(layout, config.block_m, q.device)
    sources: tuple[Any, ...] = (narrow.q, narrow.k, narrow.v)
    if use_tma:
        sources = (
            _descriptor(narrow.q.view(batch * queries, heads * columns), config.block_m, columns),
            _descriptor(narrow.k.view(batch * tokens, kv_heads * columns), config.block_n, columns),
            _descriptor(narrow.v.view(batch * kv_heads * columns, width), columns, config.block_n),
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    _fp8_kernel[(tiles.shape[0] * batch * heads,)](
        *sources,
        narrow.q_scale,
        narrow.k_scale,
        narrow.v_scale,
        out,
        tiles,
        scale * LOG2_E,
        queries,
        tokens,
        width,
        layout.anchors,
        anchor_tiles,
        tiles.shape[0] - anchor_tiles,
        heads,
        kv_heads,
        *out.stride()[:3],
        batch * heads,
        HEAD_DIM=head_dim,
        COLUMNS=columns,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        TMA=use_tma,
        INTERPRETED=q.device.type == "cpu",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


@lru_cache(maxsize=64)
def _tiles(layout: AnchorLocalLayout, block_m: int, device: torch.device) -> tuple[Tensor, int]:
    """int32 [tiles, 5]: the table of tiles, and where the values of each tile's segment begin."""
    tiles, anchor_tiles = tile_table(layout, block_m, torch.device("cpu"))
    begins = value_columns(layout, device).begins
    # The run whose queries a tile begins in; anchor tiles come first and are of none.
    run = torch.searchsorted(layout.runs[:, 0].contiguous(), tiles[anchor_tiles:, 0].long(), right=True) - 1
    column = torch.cat([torch.zeros(anchor_tiles, dtype=torch.int32), begins[run]])
    return torch.cat([tiles, column[:, None]], dim=1).to(device), anchor_tiles


def _descriptor(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
