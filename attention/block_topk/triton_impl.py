"""block_topk in Triton over ordered tokens: three small kernels select, one attends.

A program of the attention kernel has a tile of queries of one box. It walks the keys that all see, then the
whole tiles of the boxes that are kept, in one loop without a mask; then the tiles that are not whole; then,
if asked for, the mean keys of all boxes, those that are kept hidden. Which tile is next is read a step ahead.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.block_topk.layout import BoxLayout
from attention.block_topk.selection import box_scores
from attention.block_topk.tile_table import tile_table
from attention.block_topk.triton_selection import KeyLists, box_means_triton, key_lists
from attention.triton_tiles import (
    LOG2_E,
    TileConfig,
    descriptor,
    fits_descriptor,
    large_tiles,
    load_tile,
    softmax_step,
)


@dataclass(frozen=True, slots=True)
class BoxTileConfig(TileConfig):
    """Besides the shape of the work of one program, how it walks the lists.

    Attributes:
        read_ahead: the next whole tile's place is read a step before it is needed.
        edge_stages: pipeline stages of the loops over tiles that are not whole, and over mean keys.
    """

    read_ahead: bool = True
    edge_stages: int = 2


# Fixed per architecture, dtype width and head_dim, so that no request ever waits for tuning. Not yet measured
# for this kernel: shapes that anchor_local runs well with.
_HOPPER = {
    32: BoxTileConfig(128, 128, 4, 3),
    64: BoxTileConfig(64, 128, 4, 2),
    128: BoxTileConfig(128, 128, 8, 3),
    256: BoxTileConfig(128, 64, 8, 2),
}
_OTHER = {
    32: BoxTileConfig(128, 64, 4, 3),
    64: BoxTileConfig(128, 64, 4, 3),
    128: BoxTileConfig(128, 64, 8, 2),
    256: BoxTileConfig(64, 32, 8, 2),
}
_FLOAT32 = {
    32: BoxTileConfig(64, 32, 8, 2),
    64: BoxTileConfig(64, 32, 8, 2),
    128: BoxTileConfig(32, 32, 8, 2),
    256: BoxTileConfig(32, 16, 8, 2),
}

# A new length must not compile a new kernel, so nothing that depends on it is specialised.
_LENGTHS = ("tokens", "first", "first_tiles", "box_tiles", "boxes", "most_whole", "most_partial")
_STRIDES = ("q_stride_batch", "k_stride_batch", "v_stride_batch", "out_stride_batch")


@triton.jit(do_not_specialize=[*_LENGTHS, *_STRIDES, "heads", "group", "batch_heads"])
def _block_topk_kernel(
    q_source, k_source, v_source, out, tiles, whole, partial, counts, rest_keys, rest_values, rest_bias,
    scale_log2, tokens, first, first_tiles, box_tiles, boxes, most_whole, most_partial, heads, group,
    batch_heads,
    q_stride_batch, q_stride_row, q_stride_head,
    k_stride_batch, k_stride_row, k_stride_head,
    v_stride_batch, v_stride_row, v_stride_head,
    out_stride_batch, out_stride_row, out_stride_head,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    READ_AHEAD: tl.constexpr, EDGE_STAGES: tl.constexpr, REST: tl.constexpr, TMA: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    # Longest first: the tiles that see all keys, of every head, then those of the boxes. Within each part the
    # tiles of one head are neighbours, so that programs that run together share its keys in the L2 cache.
    program = tl.program_id(0)
    first_programs = first_tiles * batch_heads
    sees_all = program < first_programs
    if sees_all:
        batch_head = program // first_tiles
        tile = program % first_tiles
    else:
        batch_head = (program - first_programs) // box_tiles
        tile = first_tiles + (program - first_programs) % box_tiles
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    kv_head = head // group

    begin = tl.load(tiles + tile * 3)
    end = tl.load(tiles + tile * 3 + 1)
    box = tl.load(tiles + tile * 3 + 2)
    row_of_lists = batch_head.to(tl.int64) * boxes + box
    first_keys = first
    whole_tiles = 0
    partial_tiles = 0
    if sees_all:
        first_keys = tokens
    else:
        whole_tiles = tl.load(counts + row_of_lists * 2)
        partial_tiles = tl.load(counts + row_of_lists * 2 + 1)
        whole += row_of_lists * most_whole
        partial += row_of_lists * most_partial * 2

    batch_row, q_column, kv_column = 0, 0, 0
    if TMA:
        batch_row = (batch * tokens).to(tl.int32)
        q_column = (head * HEAD_DIM).to(tl.int32)
        kv_column = (kv_head * HEAD_DIM).to(tl.int32)
    else:
        q_source += batch * q_stride_batch + head * q_stride_head
        k_source += batch * k_stride_batch + kv_head * k_stride_head
        v_source += batch * v_stride_batch + kv_head * v_stride_head

    q = load_tile(q_source, batch_row, begin, tokens, q_column, q_stride_row, HEAD_DIM, BLOCK_M, COLUMNS, TMA)
    acc = tl.zeros([BLOCK_M, COLUMNS], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    nothing = tl.zeros([BLOCK_N], dtype=tl.float32)
    keys = tl.arange(0, BLOCK_N)

    all_tiles = first_keys // BLOCK_N
    listed = tl.load(whole, mask=(all_tiles == 0) & (whole_tiles > 0), other=0)
    for i in tl.range(0, all_tiles + whole_tiles):
        if READ_AHEAD:
            row = tl.where(i < all_tiles, i * BLOCK_N, listed)
            ahead = i + 1 - all_tiles
            listed = tl.load(whole + ahead, mask=(ahead >= 0) & (ahead < whole_tiles), other=0)
        else:
            listed = tl.load(whole + (i - all_tiles), mask=i >= all_tiles, other=0)
            row = tl.where(i < all_tiles, i * BLOCK_N, listed)
        key = load_tile(
            k_source, batch_row, row, tokens, kv_column, k_stride_row, HEAD_DIM, BLOCK_N, COLUMNS, TMA
        )
        value = load_tile(
            v_source, batch_row, row, tokens, kv_column, v_stride_row, HEAD_DIM, BLOCK_N, COLUMNS, TMA
        )
        acc, row_max, row_sum = softmax_step(
            q, key, value, acc, row_max, row_sum, scale_log2, nothing, BLOCK_M, BLOCK_N, False, INTERPRETED
        )

    # The rest of the keys that all see is a tile like those that are not whole: number -1 of them.
    all_left = first_keys - all_tiles * BLOCK_N
    begin_at = tl.where(all_left > 0, -1, 0)
    row = all_tiles * BLOCK_N
    left = all_left
    if begin_at == 0:
        row = tl.load(partial, mask=partial_tiles > 0, other=0)
        left = tl.load(partial + 1, mask=partial_tiles > 0, other=0)
    for i in tl.range(begin_at, partial_tiles, num_stages=EDGE_STAGES):
        key = load_tile(
            k_source, batch_row, row, tokens, kv_column, k_stride_row, HEAD_DIM, BLOCK_N, COLUMNS, TMA
        )
        value = load_tile(
            v_source, batch_row, row, tokens, kv_column, v_stride_row, HEAD_DIM, BLOCK_N, COLUMNS, TMA
        )
        bias = tl.where(keys < left, 0.0, float("-inf"))
        more = i + 1 < partial_tiles
        row = tl.load(partial + (i + 1) * 2, mask=more, other=0)
        left = tl.load(partial + (i + 1) * 2 + 1, mask=more, other=0)
        acc, row_max, row_sum = softmax_step(
            q, key, value, acc, row_max, row_sum, scale_log2, bias, BLOCK_M, BLOCK_N, True, INTERPRETED
        )

    if REST:
        rest_rows = boxes
        if sees_all:
            rest_rows = 0
        rest_row = ((batch * (heads // group) + kv_head) * boxes) * HEAD_DIM
        rest_keys += rest_row
        rest_values += rest_row
        rest_bias += row_of_lists * boxes
        for row in tl.range(0, rest_rows, BLOCK_N, num_stages=EDGE_STAGES):
            key = load_tile(rest_keys, 0, row, boxes, 0, HEAD_DIM, HEAD_DIM, BLOCK_N, COLUMNS, False)
            value = load_tile(rest_values, 0, row, boxes, 0, HEAD_DIM, HEAD_DIM, BLOCK_N, COLUMNS, False)
            bias = tl.load(rest_bias + row + keys, mask=row + keys < boxes, other=float("-inf"))
            acc, row_max, row_sum = softmax_step(
                q, key, value, acc, row_max, row_sum, scale_log2, bias, BLOCK_M, BLOCK_N, True, INTERPRETED
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


def block_topk_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BoxLayout,
    *,
    top_k: float,
    pooled_rest: bool,
    scale: float,
    tally: Tensor | None,
    config: BoxTileConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of ordered q [B, N, H, D] over ordered k, v [B, N, KV, D]; returns [B, N, H, D].

    The last dimension must be dense; other strides are free. Tensors whose heads lie side by side and whose
    rows are 16-byte aligned go through Hopper's tensor memory accelerator, others through pointers.
    """
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    config = config or tile_config(q)
    lists, rest = select(
        q,
        k,
        v,
        layout,
        top_k=top_k,
        pooled_rest=pooled_rest,
        scale=scale,
        tally=tally,
        block_n=config.block_n,
    )
    return attend(q, k, v, layout, lists, rest, scale=scale, config=config, out=out)


def select(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BoxLayout,
    *,
    top_k: float,
    pooled_rest: bool,
    scale: float,
    tally: Tensor | None,
    block_n: int,
) -> tuple[KeyLists | None, tuple[Tensor, Tensor] | None]:
    """What each box walks, None if there are no boxes.

    And mean keys and values [batch, kv_heads, boxes, head_dim], if asked for.
    """
    if not layout.boxes:
        return None, None
    k_means = box_means_triton(k, layout)
    scores = box_scores(box_means_triton(q, layout), k_means, scale)
    lists = key_lists(scores, layout, top_k, block_n, pooled_rest=pooled_rest, tally=tally)
    rest = (k_means.to(k.dtype), box_means_triton(v, layout).to(v.dtype)) if pooled_rest else None
    return lists, rest


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BoxLayout,
    lists: KeyLists | None,
    rest: tuple[Tensor, Tensor] | None,
    *,
    scale: float,
    config: BoxTileConfig,
    out: Tensor | None = None,
) -> Tensor:
    """The attention kernel alone, on lists for tiles of the config's block_n."""
    batch, tokens, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    columns = max(16, triton.next_power_of_2(head_dim))
    tiles, first_tiles = tile_table(layout, config.block_m, q.device)
    use_tma = large_tiles(q.device) and columns == head_dim and all(fits_descriptor(x) for x in (q, k, v))
    sources: tuple[Any, ...] = (q, k, v)
    if use_tma:
        rows = (config.block_m, config.block_n, config.block_n)
        sources = tuple(map(descriptor, (q, k, v), rows))
    unused = layout.bounds
    _block_topk_kernel[(tiles.shape[0] * batch * heads,)](
        *sources,
        out,
        tiles,
        *(unused,) * 3 if lists is None else (lists.whole, lists.partial, lists.counts),
        *(unused,) * 2 if rest is None else rest,
        unused if lists is None or lists.rest_bias is None else lists.rest_bias,
        scale * LOG2_E,
        tokens,
        layout.first,
        first_tiles,
        tiles.shape[0] - first_tiles,
        layout.boxes,
        0 if lists is None else lists.whole.shape[1],
        0 if lists is None else lists.partial.shape[1],
        heads,
        heads // k.shape[2],
        batch * heads,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        HEAD_DIM=head_dim,
        COLUMNS=columns,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        READ_AHEAD=config.read_ahead,
        EDGE_STAGES=config.edge_stages,
        REST=rest is not None,
        TMA=use_tma,
        INTERPRETED=q.device.type == "cpu",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def tile_config(q: Tensor) -> BoxTileConfig:
    """Tiles for the dtype, head_dim and device of such queries."""
    width = max(32, triton.next_power_of_2(q.shape[3]))
    if q.dtype == torch.float32:
        return _FLOAT32[width]
    return (_HOPPER if large_tiles(q.device) else _OTHER)[width]
