"""anchor_local as one Triton kernel over ordered tokens.

The kernel knows the number of anchors and, for each tile of queries, one segment of keys. It walks two
contiguous ranges of keys in one loop, ``[0, anchors)`` and ``[key_begin, key_end)``; an anchor tile walks
``[0, tokens)``. Only the last, partial tile of a range is masked, and no key is visited twice.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.anchor_local.tile_table import tile_table
from attention.layout import AnchorLocalLayout
from attention.triton_dot import dot
from attention.triton_tiles import LOG2_E, TileConfig, descriptor, fits_descriptor, large_tiles, load_tile

# Fixed per architecture, dtype width and head_dim, so that no request ever waits for tuning. The Hopper rows
# were measured on an H200 (benchmarks/attention.py --tune); the others keep the shared memory of one program
# below the 99 KiB of Ada and consumer Ampere.
_HOPPER = {
    32: TileConfig(128, 128, 4, 3),
    64: TileConfig(64, 128, 4, 2),
    128: TileConfig(128, 128, 8, 3),
    256: TileConfig(128, 64, 8, 2),
}
_OTHER = {
    32: TileConfig(128, 64, 4, 3),
    64: TileConfig(128, 64, 4, 3),
    128: TileConfig(128, 64, 8, 2),
    256: TileConfig(64, 32, 8, 2),
}
_FLOAT32 = {
    32: TileConfig(64, 32, 8, 2),
    64: TileConfig(64, 32, 8, 2),
    128: TileConfig(32, 32, 8, 2),
    256: TileConfig(32, 16, 8, 2),
}


@triton.jit
def _softmax_step(
    q, key, value, acc, row_max, row_sum, scale_log2, keys_left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax (base 2, float32) over a tile of keys, of which keys_left are valid."""
    scores = dot(q, key.T, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32), INTERPRETED)
    if MASKED:
        scores = tl.where((tl.arange(0, BLOCK_N) < keys_left)[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    weights = tl.math.exp2(scores * scale_log2 - new_max[:, None])
    decay = tl.math.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = dot(weights.to(value.dtype), value, acc, INTERPRETED)
    return acc, new_max, row_sum


# A new length must not compile a new kernel, so nothing that depends on it is specialised.
_LENGTHS = ("queries", "tokens", "anchors", "anchor_tiles", "segment_tiles", "batch_heads")
_STRIDES = ("q_stride_batch", "k_stride_batch", "v_stride_batch", "out_stride_batch")


@triton.jit(do_not_specialize=[*_LENGTHS, *_STRIDES, "heads", "group"])
def _anchor_local_kernel(
    q_source, k_source, v_source, out, tiles, scale_log2,
    queries, tokens, anchors, anchor_tiles, segment_tiles, heads, group,
    q_stride_batch, q_stride_row, q_stride_head,
    k_stride_batch, k_stride_row, k_stride_head,
    v_stride_batch, v_stride_row, v_stride_head,
    out_stride_batch, out_stride_row, out_stride_head,
    batch_heads,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # Longest first: the anchor tiles of every head, then the segment tiles. Within each part the tiles of one
    # head are neighbours, so that programs that run together share that head's keys in the L2 cache.
    program = tl.program_id(0)
    anchor_programs = anchor_tiles * batch_heads
    if program < anchor_programs:
        batch_head = program // anchor_tiles
        tile = program % anchor_tiles
    else:
        batch_head = (program - anchor_programs) // segment_tiles
        tile = anchor_tiles + (program - anchor_programs) % segment_tiles
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    kv_head = head // group

    begin = tl.load(tiles + tile * 4)
    end = tl.load(tiles + tile * 4 + 1)
    key_begin = tl.load(tiles + tile * 4 + 2)
    key_end = tl.load(tiles + tile * 4 + 3)
    first_count = anchors
    if program < anchor_programs:
        first_count = tokens

    q_batch_row, kv_batch_row = 0, 0
    q_column, kv_column = 0, 0
    if TMA:
        q_batch_row = (batch * queries).to(tl.int32)
        kv_batch_row = (batch * tokens).to(tl.int32)
        q_column = (head * HEAD_DIM).to(tl.int32)
        kv_column = (kv_head * HEAD_DIM).to(tl.int32)
    else:
        q_source += batch * q_stride_batch + head * q_stride_head
        k_source += batch * k_stride_batch + kv_head * k_stride_head
        v_source += batch * v_stride_batch + kv_head * v_stride_head

    q = load_tile(
        q_source, q_batch_row, begin, queries, q_column, q_stride_row, HEAD_DIM, BLOCK_M, COLUMNS, TMA
    )
    acc = tl.zeros([BLOCK_M, COLUMNS], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    first_tiles = first_count // BLOCK_N
    second_tiles = (key_end - key_begin) // BLOCK_N
    for i in tl.range(0, first_tiles + second_tiles):
        row = tl.where(i < first_tiles, i * BLOCK_N, key_begin + (i - first_tiles) * BLOCK_N)
        key = load_tile(
            k_source, kv_batch_row, row, tokens, kv_column, k_stride_row, HEAD_DIM, BLOCK_N, COLUMNS, TMA
        )
        value = load_tile(
            v_source, kv_batch_row, row, tokens, kv_column, v_stride_row, HEAD_DIM, BLOCK_N, COLUMNS, TMA
        )
        acc, row_max, row_sum = _softmax_step(
            q, key, value, acc, row_max, row_sum, scale_log2, BLOCK_N, BLOCK_M, BLOCK_N, False, INTERPRETED
        )
    first_rest = first_count - first_tiles * BLOCK_N
    if first_rest > 0:
        row = first_tiles * BLOCK_N
        key = load_tile(
            k_source, kv_batch_row, row, tokens, kv_column, k_stride_row, HEAD_DIM, BLOCK_N, COLUMNS, TMA
        )
        value = load_tile(
            v_source, kv_batch_row, row, tokens, kv_column, v_stride_row, HEAD_DIM, BLOCK_N, COLUMNS, TMA
        )
        acc, row_max, row_sum = _softmax_step(
            q, key, value, acc, row_max, row_sum, scale_log2, first_rest, BLOCK_M, BLOCK_N, True, INTERPRETED
        )
    second_rest = key_end - key_begin - second_tiles * BLOCK_N
    if second_rest > 0:
        row = key_begin + second_tiles * BLOCK_N
        key = load_tile(
            k_source, kv_batch_row, row, tokens, kv_column, k_stride_row, HEAD_DIM, BLOCK_N, COLUMNS, TMA
        )
        value = load_tile(
            v_source, kv_batch_row, row, tokens, kv_column, v_stride_row, HEAD_DIM, BLOCK_N, COLUMNS, TMA
        )
        acc, row_max, row_sum = _softmax_step(
            q, key, value, acc, row_max, row_sum, scale_log2, second_rest, BLOCK_M, BLOCK_N, True, INTERPRETED
        )

    acc = acc / row_sum[:, None]
    rows = begin + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, COLUMNS)
    out += batch * out_stride_batch + head * out_stride_head
    tl.store(
        out + rows[:, None].to(tl.int64) * out_stride_row + columns[None, :],
        acc.to(out.dtype.element_ty),
        mask=(rows < end)[:, None] & (columns < HEAD_DIM)[None, :],
    )


def anchor_local_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnchorLocalLayout,
    scale: float,
    config: TileConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of ordered q [B, M, H, D] over ordered k, v [B, N, KV, D]; returns [B, M, H, D].

    The last dimension must be dense; other strides are free. Tensors whose heads lie side by side and whose
    rows are 16-byte aligned go through Hopper's tensor memory accelerator, others through pointers.
    """
    batch, queries, heads, head_dim = q.shape
    tokens = k.shape[1]
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    columns = max(16, triton.next_power_of_2(head_dim))
    config = config or _tile_config(q, columns)
    tiles, anchor_tiles = tile_table(layout, config.block_m, q.device)
    use_tma = large_tiles(q.device) and columns == head_dim and all(fits_descriptor(x) for x in (q, k, v))
    sources: tuple[Any, ...] = (q, k, v)
    if use_tma:
        sources = (
            descriptor(q, config.block_m),
            descriptor(k, config.block_n),
            descriptor(v, config.block_n),
        )
    _anchor_local_kernel[(tiles.shape[0] * batch * heads,)](
        *sources,
        out,
        tiles,
        scale * LOG2_E,
        queries,
        tokens,
        layout.anchors,
        anchor_tiles,
        tiles.shape[0] - anchor_tiles,
        heads,
        heads // k.shape[2],
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
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


def _tile_config(q: Tensor, columns: int) -> TileConfig:
    width = max(32, columns)
    if q.dtype == torch.float32:
        return _FLOAT32[width]
    return (_HOPPER if large_tiles(q.device) else _OTHER)[width]
