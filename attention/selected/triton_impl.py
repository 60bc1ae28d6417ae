"""sparse_attn as one Triton kernel.

One program does one query token and a tile of its heads. It walks the query's list; the rows of a step are
gathered once, for all heads of the tile, and are keys in one product and values in the next. The sink is
where the online softmax starts: a row maximum with weight one and no value.

A width that is no power of two is two parts, each padded to one: 576 is 512 and 64.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.choice import is_data_center_gpu
from attention.triton_dot import dot
from attention.triton_tiles import LARGEST_SINK

_LOG2_E = tl.constexpr(1.4426950408889634)
# Where a row's maximum starts if there is no sink: so far below every score that the weight of one which it
# starts with is nothing beside the first key's, yet finite, so that a step in which nothing is listed leaves
# -inf - _LOWEST = -inf, a weight of zero, and never -inf - -inf.
_LOWEST = tl.constexpr(-3.0e38)
_FEWEST_HEADS = 16  # rows of the smallest matrix product


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Shape of the work of one program: heads, list entries per loop step, warps and pipeline stages.

    ``split_keys`` lets groups of warps that share a program's heads share its scores too, each some keys;
    else each computes them all. The maximum of a row then goes through shared memory.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    split_keys: bool = False


# By columns that a program holds, padded; fixed per architecture, so that no request ever waits for tuning.
# On Hopper 512 columns were measured (docs/notes.md); the rest is chosen from compiled code: shared memory
# (227 KiB on Hopper, 99 KiB on Ada and consumer Blackwell), no or hardly any spilled registers, and as few
# products done twice.
_HOPPER = {
    128: TileConfig(64, 64, 4, 4),
    256: TileConfig(64, 64, 4, 4),
    512: TileConfig(64, 64, 8, 2, split_keys=True),
    1024: TileConfig(64, 32, 8, 3, split_keys=True),
}
_OTHER = {
    128: TileConfig(64, 64, 4, 3),
    256: TileConfig(32, 32, 4, 3),
    512: TileConfig(32, 32, 8, 3, split_keys=True),
    1024: TileConfig(32, 16, 8, 3, split_keys=True),
}
# Wide rows spill registers of 4 warps.
_FLOAT32 = {256: TileConfig(16, 16, 4, 3), 1024: TileConfig(16, 16, 8, 3)}


@triton.jit
def _load_rows(source, rows, is_row, stride, FROM: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """[rows, COLUMNS]: columns FROM .. of the rows that are some, zero elsewhere and beyond WIDTH."""
    columns = FROM + tl.arange(0, COLUMNS)
    pointers = source + rows[:, None] * stride + columns[None, :]
    if FROM + COLUMNS == WIDTH:
        loaded = tl.load(pointers, mask=is_row[:, None], other=0.0)
    else:
        loaded = tl.load(pointers, mask=is_row[:, None] & (columns < WIDTH)[None, :], other=0.0)
    return loaded


@triton.jit
def _softmax_step(scores, row_max, row_sum):
    """Weights of these scores (base 2), the factor of all before, and maximum and sum with them."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.math.exp2(scores - new_max[:, None])
    decay = tl.math.exp2(row_max - new_max)
    return weights, decay, new_max, row_sum * decay + tl.sum(weights, 1)


@triton.jit
def _add_values(acc, decay, weights, rows, INTERPRETED: tl.constexpr):
    """acc * decay + weights @ rows."""
    if weights.dtype == tl.float32:
        # The rows of a step are added up apart: in one sum over a long list, roundings that all go the same
        # way, as those of a row that is listed often do, grow with the list. An fma, since of a product and a
        # sum Triton makes a product that goes on from acc.
        nothing = tl.zeros(acc.shape, dtype=tl.float32)
        acc = tl.fma(acc, decay[:, None], dot(weights, rows, nothing, INTERPRETED))
    else:
        acc = dot(weights, rows, acc * decay[:, None], INTERPRETED)
    return acc


# A new number of queries or rows must not compile a new kernel, so no number is specialised. What 16-byte
# loads must know of the strides, that they are multiples of 8 elements, they learn from STRIDE_UNIT.
_STRIDES = (
    *("q_stride_batch", "q_stride_query", "q_stride_head", "kv_stride_batch", "kv_stride_row"),
    *("list_stride_batch", "list_stride_query"),
)


@triton.jit(do_not_specialize=["queries", "heads", "rows", "listed", *_STRIDES])
def _sparse_attn_kernel(
    q_source, kv_source, out, sink_source, lists, scale_log2, queries, heads, rows, listed,
    q_stride_batch, q_stride_query, q_stride_head, kv_stride_batch, kv_stride_row,
    list_stride_batch, list_stride_query,
    WIDTH: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, STRIDE_UNIT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    # Tiles of one query are neighbours: they gather the same rows at about the same time.
    program = tl.program_id(0)
    tiles = tl.cdiv(heads, BLOCK_H)
    query = (program // tiles).to(tl.int64)
    batch = query // queries
    in_batch = query % queries
    head = (program % tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < heads
    # int64 before any product: tensors may have more than 2^31 elements.
    q_source += batch * q_stride_batch * STRIDE_UNIT + in_batch * q_stride_query * STRIDE_UNIT
    kv_source += batch * kv_stride_batch * STRIDE_UNIT
    kv_stride = kv_stride_row.to(tl.int64) * STRIDE_UNIT
    lists += batch * list_stride_batch + in_batch * list_stride_query

    q_stride = q_stride_head.to(tl.int64) * STRIDE_UNIT
    q = _load_rows(q_source, head, is_head, q_stride, 0, MAIN, WIDTH)
    acc = tl.zeros([BLOCK_H, MAIN], dtype=tl.float32)
    if REST:
        q_rest = _load_rows(q_source, head, is_head, q_stride, MAIN, REST, WIDTH)
        acc_rest = tl.zeros([BLOCK_H, REST], dtype=tl.float32)
    sink = tl.load(sink_source + head, mask=is_head, other=0.0)
    sink = tl.minimum(tl.maximum(sink, -LARGEST_SINK), LARGEST_SINK) * _LOG2_E
    row_max = tl.maximum(sink, _LOWEST)
    row_sum = tl.full([BLOCK_H], 1.0, dtype=tl.float32)

    for first in range(0, listed, BLOCK_N):
        entries = first + tl.arange(0, BLOCK_N)
        index = tl.load(lists + entries, mask=entries < listed, other=-1)
        is_key = (index >= 0) & (index < rows)
        index = index.to(tl.int64)
        keys = _load_rows(kv_source, index, is_key, kv_stride, 0, MAIN, WIDTH)
        nothing = tl.zeros([BLOCK_H, BLOCK_N], dtype=tl.float32)
        scores = dot(q, keys.T, nothing, INTERPRETED) * scale_log2
        if REST:
            # Scaled before they are added: else Triton starts one product with the other, which then is one
            # that another uses, see below.
            keys_rest = _load_rows(kv_source, index, is_key, kv_stride, MAIN, REST, WIDTH)
            scores += dot(q_rest, keys_rest.T, nothing, INTERPRETED) * scale_log2
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        if SPLIT_KEYS:
            # Always true, but Triton does not know, and looks no further than the block for a product that
            # uses this one. Where it finds one it gives all keys to each of several warp groups, which
            # then all do the same product.
            if queries > 0:
                weights, decay, row_max, row_sum = _softmax_step(scores, row_max, row_sum)
            else:
                weights, decay = scores, row_max
        else:
            weights, decay, row_max, row_sum = _softmax_step(scores, row_max, row_sum)
        weights = weights.to(keys.dtype)
        acc = _add_values(acc, decay, weights, keys, INTERPRETED)
        if REST:
            acc_rest = _add_values(acc_rest, decay, weights, keys_rest, INTERPRETED)

    out += query * heads * WIDTH
    columns = tl.arange(0, MAIN)
    tl.store(
        out + head[:, None] * WIDTH + columns[None, :],
        (acc / row_sum[:, None]).to(out.dtype.element_ty),
        mask=is_head[:, None] & (columns < WIDTH)[None, :],
    )
    if REST:
        columns = MAIN + tl.arange(0, REST)
        tl.store(
            out + head[:, None] * WIDTH + columns[None, :],
            (acc_rest / row_sum[:, None]).to(out.dtype.element_ty),
            mask=is_head[:, None] & (columns < WIDTH)[None, :],
        )


def sparse_attn_triton(
    q: Tensor,
    kv: Tensor,
    sink: Tensor,
    topk_idxs: Tensor,
    scale: float,
    config: TileConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of q [b, m, h, d] over the listed rows of kv [b, n, d]; returns [b, m, h, d].

    The last dimensions must be dense; other strides are free. ``out`` must be contiguous. Nothing waits for
    the device.
    """
    batch, queries, heads, width = q.shape
    q, kv, topk_idxs = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, kv, topk_idxs))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if out.numel() == 0:
        return out
    main, rest = parts(width)
    if config is None:
        config = tile_config(q.dtype, width, heads, is_data_center_gpu(q.device))
    strides = (*q.stride()[:3], *kv.stride()[:2])
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    _sparse_attn_kernel[(batch * queries * triton.cdiv(heads, config.block_h),)](
        q,
        kv,
        out,
        sink.contiguous(),
        topk_idxs,
        scale * _LOG2_E.value,
        queries,
        heads,
        kv.shape[1],
        topk_idxs.shape[2],
        *(stride // unit for stride in strides),
        *topk_idxs.stride()[:2],
        WIDTH=width,
        MAIN=main,
        REST=rest,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        SPLIT_KEYS=config.split_keys,
        STRIDE_UNIT=unit,
        INTERPRETED=q.device.type == "cpu",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def tile_config(dtype: torch.dtype, width: int, heads: int, hopper: bool) -> TileConfig:
    """Tiles for so many heads and columns; no more heads than there are, padded to a power of two."""
    table = _FLOAT32 if dtype == torch.float32 else _HOPPER if hopper else _OTHER
    columns = sum(parts(width))
    config = table[min(c for c in table if c >= columns)]
    most = max(_FEWEST_HEADS, triton.next_power_of_2(heads))
    return replace(config, block_h=min(config.block_h, most))


def parts(width: int) -> tuple[int, int]:
    """Powers of two that together hold so many columns: the largest in it, at least 16, and the rest's."""
    main = max(16, 2 ** (width.bit_length() - 1))
    rest = width - main
    return main, max(16, triton.next_power_of_2(rest)) if rest > 0 else 0
