"""sparse_attn on Hopper as one Gluon kernel, for rows of 512 or 576 columns.

A program walks over work items: one query and a tile of 64 heads. Three partitions of four warps run at once.
The producer gathers the listed rows, a tile at a time, into a ring of buffers. Two consumers share
everything else: each owns half of the output columns and computes the scores of every other tile, whose
weights it hands to the other one through shared memory, so that no product is done twice.

Synchronisation is by barriers in shared memory, each of which counts phases:

* ``full``, ``empty``: a buffer of rows was gathered (every producer thread arrives); both consumers are done;
* ``q_full``, ``q_empty``: the same for the queries of a work item;
* ``p_full``, ``p_empty``: weights and row maxima of a tile are there; the other consumer has used them;
* ``l_full``: a consumer's part of the row sums is there.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from attention.triton_tiles import LARGEST_SINK

# Triton 3.9 and 3.6 name these two differently.
_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

_LOG2_E = gl.constexpr(1.4426950408889634)
_LOWEST = gl.constexpr(-3.0e38)  # where a row's maximum starts if there is no sink; see triton_impl
_BLOCK_H = gl.constexpr(64)  # rows of a warp group's matrix product
_HALF = gl.constexpr(256)  # columns of each consumer, without those beyond 512
_WARPS = gl.constexpr(4)  # of a partition


@dataclass(frozen=True, slots=True)
class GluonConfig:
    """Listed rows of a tile, buffers of them, and how consumers work.

    ``scores_first``: start the scores of the next tile before the values of this one are added up; needs
    more than two buffers. ``persistent``: as many programs as multiprocessors, each with many work items.
    """

    block_n: int
    stages: int
    scores_first: bool
    persistent: bool
    consumer_registers: int = 216
    producer_registers: int = 72


# The fastest of ten on an H200, by width. With 56 registers the producer reloads an address or two; consumers
# spill nothing.
DEFAULT = {512: GluonConfig(64, 2, False, True, 224, 56), 576: GluonConfig(32, 4, True, True)}


@gluon.jit
def _producer(
    q_source, kv_source, lists, smem, bars, works, queries, heads, rows, listed, strides,
    WIDTH: gl.constexpr, REST: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    STRIDE_UNIT: gl.constexpr,
):  # fmt: skip
    q, q_rest, kv_0, kv_1, kv_rest_0, kv_rest_1, _p, _m, _l, flags = smem
    full, empty, q_full, q_empty, _p_full, _p_empty, _l_full = bars
    (
        q_stride_batch,
        q_stride_query,
        q_stride_head,
        kv_stride_batch,
        kv_stride_row,
        list_stride_batch,
        list_stride_query,
    ) = strides
    # Eight threads copy 128 bytes of a row, a warp four rows.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [_WARPS, 1], [1, 0])
    rest_layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [_WARPS, 1], [1, 0])
    columns = gl.arange(0, _HALF, layout=gl.SliceLayout(0, layout))[None, :]
    tiles_h = gl.cdiv(heads, _BLOCK_H)
    pair: gl.constexpr = 2 * BLOCK_N
    padded = gl.cdiv(listed, pair) * pair
    tile = 0
    turn = 0
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        query = (work // tiles_h).to(gl.int64)
        batch = query // queries
        in_batch = query % queries
        own_q = q_source + batch * q_stride_batch * STRIDE_UNIT + in_batch * q_stride_query * STRIDE_UNIT
        own_kv = kv_source + batch * kv_stride_batch * STRIDE_UNIT
        own_list = lists + batch * list_stride_batch + in_batch * list_stride_query

        head = (work % tiles_h) * _BLOCK_H + gl.arange(0, _BLOCK_H, layout=gl.SliceLayout(1, layout))
        q_rows = (own_q + head.to(gl.int64) * q_stride_head * STRIDE_UNIT)[:, None] + columns
        is_head = (head < heads)[:, None]
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        _async_load(q.index(0), q_rows, mask=is_head)
        _async_load(q.index(1), q_rows + _HALF, mask=is_head)
        if REST:
            rest_columns = gl.arange(0, REST, layout=gl.SliceLayout(0, rest_layout))[None, :]
            head = (work % tiles_h) * _BLOCK_H + gl.arange(0, _BLOCK_H, layout=gl.SliceLayout(1, rest_layout))
            q_rows = (own_q + head.to(gl.int64) * q_stride_head * STRIDE_UNIT)[:, None] + rest_columns
            is_head = (head < heads)[:, None]
            _async_load(q_rest.index(0), q_rows + 2 * _HALF, mask=is_head)
            _async_load(q_rest.index(1), q_rows + (2 * _HALF + REST), mask=is_head)
        async_copy.mbarrier_arrive(q_full, increment_count=False)

        for first in range(0, padded, BLOCK_N):
            stage = tile % STAGES
            entry = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
            index = gl.load(own_list + entry, mask=entry < listed, other=-1)
            if REST:
                rest_entry = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, rest_layout))
                rest_index = gl.load(own_list + rest_entry, mask=rest_entry < listed, other=-1)
            mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
            # Rows that nothing names become zeros: weight zero times whatever was there could be NaN.
            is_key = (index >= 0) & (index < rows)
            flags.index(stage).store(is_key.to(gl.int32))
            is_key = is_key[:, None]
            keys = (own_kv + index.to(gl.int64) * kv_stride_row * STRIDE_UNIT)[:, None] + columns
            _async_load(kv_0.index(stage), keys, mask=is_key)
            _async_load(kv_1.index(stage), keys + _HALF, mask=is_key)
            if REST:
                is_key = ((rest_index >= 0) & (rest_index < rows))[:, None]
                keys = own_kv + rest_index.to(gl.int64) * kv_stride_row * STRIDE_UNIT
                keys = keys[:, None] + rest_columns
                _async_load(kv_rest_0.index(stage), keys + 2 * _HALF, mask=is_key)
                _async_load(kv_rest_1.index(stage), keys + (2 * _HALF + REST), mask=is_key)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            _barrier()
            mbarrier.arrive(full.index(stage), count=1)  # flags were no asynchronous copies
            tile += 1
        turn += 1  # noqa: SIM113 - kernels have no enumerate


@gluon.jit
def _start_scores(smem, stage, pair, layout: gl.constexpr, BLOCK_N: gl.constexpr, REST: gl.constexpr):
    """Start q @ keys of a buffer, float32 [heads, rows]."""
    q, q_rest, kv_0, kv_1, kv_rest_0, kv_rest_1, _p, _m, _l, _flags = smem
    # Always zero, but no compiler knows: else descriptors of q for every step of the product are computed
    # before the loop and fill the registers.
    zero = pair >> 30
    scores = gl.zeros([_BLOCK_H, BLOCK_N], gl.float32, layout)
    keys = kv_0.index(stage).permute((1, 0))
    scores = hopper.warpgroup_mma(q.index(zero), keys, scores, use_acc=False, is_async=True)
    keys = kv_1.index(stage).permute((1, 0))
    scores = hopper.warpgroup_mma(q.index(zero + 1), keys, scores, is_async=True)
    if REST:
        keys = kv_rest_0.index(stage).permute((1, 0))
        scores = hopper.warpgroup_mma(q_rest.index(zero), keys, scores, is_async=True)
        keys = kv_rest_1.index(stage).permute((1, 0))
        scores = hopper.warpgroup_mma(q_rest.index(zero + 1), keys, scores, is_async=True)
    return scores


@gluon.jit
def _start_values(smem, stage, weights, acc, acc_rest, OWN: gl.constexpr, REST: gl.constexpr):
    """Start acc += weights @ own columns of a buffer."""
    _q, _q_rest, kv_0, kv_1, kv_rest_0, kv_rest_1, _p, _m, _l, _flags = smem
    acc = hopper.warpgroup_mma(weights, (kv_1 if OWN else kv_0).index(stage), acc, is_async=True)
    if REST:
        values = (kv_rest_1 if OWN else kv_rest_0).index(stage)
        acc_rest = hopper.warpgroup_mma(weights, values, acc_rest, is_async=True)
    return acc, acc_rest


@gluon.jit
def _finish_values(acc, acc_rest, REST: gl.constexpr):
    """Wait for all products; then every warp of the consumer has done its part."""
    if REST:
        acc, acc_rest = hopper.warpgroup_mma_wait(0, deps=(acc, acc_rest))
    else:
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    _barrier()
    return acc, acc_rest


@gluon.jit
def _scale(acc, acc_rest, factor, REST: gl.constexpr):
    """Rows times a factor each."""
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    if REST:
        acc_rest = acc_rest * gl.convert_layout(factor, gl.SliceLayout(1, acc_rest.type.layout))[:, None]
    return acc, acc_rest


@gluon.jit
def _wait_for_rows(bars, tile, STAGES: gl.constexpr):
    """Wait until the buffer of a tile was gathered; returns its number."""
    full, _empty, _q_full, _q_empty, _p_full, _p_empty, _l_full = bars
    mbarrier.wait(full.index(tile % STAGES), (tile // STAGES) & 1)
    hopper.fence_async_shared()  # ordinary copies wrote what products are about to read
    return tile % STAGES


@gluon.jit
def _weigh(
    smem, bars, stage, scores, row_max, row_sum, scale_log2, pair,
    OWN: gl.constexpr, SCORES_FIRST: gl.constexpr,
):  # fmt: skip
    """Softmax of own scores, handed over. Returns the factor of all before, and maximum and sum with them."""
    _q, _q_rest, _kv_0, _kv_1, _kv_rest_0, _kv_rest_1, p, m, _l, flags = smem
    _full, _empty, _q_full, _q_empty, p_full, p_empty, _l_full = bars
    is_key = flags.index(stage).load(gl.SliceLayout(0, scores.type.layout)) != 0
    scores = gl.where(is_key[None, :], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_max[:, None])
    decay = gl.exp2(row_max - new_max)
    row_sum = row_sum * decay + gl.sum(weights, 1)
    buffer: gl.constexpr = OWN if SCORES_FIRST else 0
    if SCORES_FIRST:
        mbarrier.wait(p_empty.index(OWN), (pair & 1) ^ 1)
    else:
        # One buffer: the tile before is the other consumer's, which must have used its weights.
        mbarrier.wait(p_empty.index(1 - OWN), (pair & 1) ^ (1 - OWN))
    m.index(OWN).store(new_max)
    p.index(buffer).store(weights.to(p.dtype))
    hopper.fence_async_shared()
    _barrier()
    mbarrier.arrive(p_full.index(OWN), count=1)
    return decay, new_max, row_sum


@gluon.jit
def _own_values(
    smem, bars, stage, acc, acc_rest, decay, is_last,
    OWN: gl.constexpr, REST: gl.constexpr, SCORES_FIRST: gl.constexpr,
):  # fmt: skip
    """Add the values of an own tile, whose weights are there, and release it."""
    _q, _q_rest, _kv_0, _kv_1, _kv_rest_0, _kv_rest_1, p, _m, _l, _flags = smem
    _full, empty, _q_full, q_empty, _p_full, p_empty, _l_full = bars
    mbarrier.arrive(q_empty, count=1, pred=is_last)
    acc, acc_rest = _scale(acc, acc_rest, decay, REST)
    buffer: gl.constexpr = OWN if SCORES_FIRST else 0
    acc, acc_rest = _start_values(smem, stage, p.index(buffer), acc, acc_rest, OWN, REST)
    acc, acc_rest = _finish_values(acc, acc_rest, REST)
    mbarrier.arrive(empty.index(stage), count=1)
    if not SCORES_FIRST:
        mbarrier.arrive(p_empty.index(OWN), count=1)
    return acc, acc_rest


@gluon.jit
def _start_other_values(
    smem, bars, tile, acc, acc_rest, row_max, row_sum, pair,
    OWN: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr, SCORES_FIRST: gl.constexpr,
):  # fmt: skip
    """Wait for the other consumer's weights and start to add their values. Returns also maximum and sum."""
    _q, _q_rest, _kv_0, _kv_1, _kv_rest_0, _kv_rest_1, p, m, _l, _flags = smem
    _full, _empty, _q_full, _q_empty, p_full, _p_empty, _l_full = bars
    mbarrier.wait(p_full.index(1 - OWN), pair & 1)
    new_max = m.index(1 - OWN).load(row_max.type.layout)
    decay = gl.exp2(row_max - new_max)
    acc, acc_rest = _scale(acc, acc_rest, decay, REST)
    stage = _wait_for_rows(bars, tile, STAGES)
    buffer: gl.constexpr = 1 - OWN if SCORES_FIRST else 0
    acc, acc_rest = _start_values(smem, stage, p.index(buffer), acc, acc_rest, OWN, REST)
    return acc, acc_rest, new_max, row_sum * decay


@gluon.jit
def _finish_other_values(
    bars, tile, acc, acc_rest,
    OWN: gl.constexpr, REST: gl.constexpr, STAGES: gl.constexpr, SCORES_FIRST: gl.constexpr,
):  # fmt: skip
    _full, empty, _q_full, _q_empty, _p_full, p_empty, _l_full = bars
    acc, acc_rest = _finish_values(acc, acc_rest, REST)
    mbarrier.arrive(empty.index(tile % STAGES), count=1)
    if SCORES_FIRST:
        mbarrier.arrive(p_empty.index(1 - OWN), count=1)
    return acc, acc_rest


@gluon.jit
def _consumer(
    sink_source, out, smem, bars, works, heads, listed, scale_log2,
    OWN: gl.constexpr, WIDTH: gl.constexpr, REST: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SCORES_FIRST: gl.constexpr,
):  # fmt: skip
    l_parts = smem[8]
    q_full, l_full = bars[2], bars[6]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, _HALF, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    tiles_h = gl.cdiv(heads, _BLOCK_H)
    pairs = gl.cdiv(listed, 2 * BLOCK_N)
    pair = 0  # counts over all work items, as phases of barriers do
    turn = 0
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        query = (work // tiles_h).to(gl.int64)
        head = (work % tiles_h) * _BLOCK_H + gl.arange(0, _BLOCK_H, layout=row_layout)
        sink = gl.load(sink_source + head, mask=head < heads, other=0.0)
        sink = gl.minimum(gl.maximum(sink, -LARGEST_SINK), LARGEST_SINK) * _LOG2_E
        row_max = gl.maximum(sink, _LOWEST)
        row_sum = gl.full([_BLOCK_H], 1.0 - OWN, gl.float32, row_layout)
        acc = gl.zeros([_BLOCK_H, _HALF], gl.float32, o_layout)
        if REST:
            r_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, REST, 16])
            acc_rest = gl.zeros([_BLOCK_H, REST], gl.float32, r_layout)
        else:
            acc_rest = 0.0
        mbarrier.wait(q_full, turn & 1)

        if SCORES_FIRST and OWN == 0:
            stage = _wait_for_rows(bars, 2 * pair, STAGES)
            scores = _start_scores(smem, stage, pair, s_layout, BLOCK_N, REST)
            scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
            decay, row_max, row_sum = _weigh(
                smem, bars, stage, scores, row_max, row_sum, scale_log2, pair, OWN, SCORES_FIRST
            )
            acc, acc_rest = _own_values(
                smem, bars, stage, acc, acc_rest, decay, pairs == 1, OWN, REST, SCORES_FIRST
            )
        for step in range(1 if SCORES_FIRST and OWN == 0 else 0, pairs):
            other = 2 * pair + 1 - OWN
            if SCORES_FIRST:
                # The first consumer's next tile comes after the second's one of the same pair.
                own = 2 * pair + (OWN if OWN == 1 else 2)
                own_pair = own // 2
                stage = _wait_for_rows(bars, own, STAGES)
                scores = _start_scores(smem, stage, pair, s_layout, BLOCK_N, REST)
                acc, acc_rest, row_max, row_sum = _start_other_values(
                    smem, bars, other, acc, acc_rest, row_max, row_sum, pair, OWN, REST, STAGES, SCORES_FIRST
                )
                scores = hopper.warpgroup_mma_wait(2 if REST else 1, deps=(scores,))
                decay, row_max, row_sum = _weigh(
                    smem, bars, stage, scores, row_max, row_sum, scale_log2, own_pair, OWN, SCORES_FIRST
                )
                acc, acc_rest = _finish_other_values(
                    bars, other, acc, acc_rest, OWN, REST, STAGES, SCORES_FIRST
                )
                acc, acc_rest = _own_values(
                    smem, bars, stage, acc, acc_rest, decay, step == pairs - 1, OWN, REST, SCORES_FIRST
                )
            else:
                own = 2 * pair + OWN
                if OWN == 1:
                    acc, acc_rest, row_max, row_sum = _start_other_values(
                        smem, bars, other, acc, acc_rest, row_max, row_sum, pair,
                        OWN, REST, STAGES, SCORES_FIRST,
                    )  # fmt: skip
                    acc, acc_rest = _finish_other_values(
                        bars, other, acc, acc_rest, OWN, REST, STAGES, SCORES_FIRST
                    )
                stage = _wait_for_rows(bars, own, STAGES)
                scores = _start_scores(smem, stage, pair, s_layout, BLOCK_N, REST)
                scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
                decay, row_max, row_sum = _weigh(
                    smem, bars, stage, scores, row_max, row_sum, scale_log2, pair, OWN, SCORES_FIRST
                )
                acc, acc_rest = _own_values(
                    smem, bars, stage, acc, acc_rest, decay, step == pairs - 1, OWN, REST, SCORES_FIRST
                )
                if OWN == 0:
                    acc, acc_rest, row_max, row_sum = _start_other_values(
                        smem, bars, other, acc, acc_rest, row_max, row_sum, pair,
                        OWN, REST, STAGES, SCORES_FIRST,
                    )  # fmt: skip
                    acc, acc_rest = _finish_other_values(
                        bars, other, acc, acc_rest, OWN, REST, STAGES, SCORES_FIRST
                    )
            pair += 1
        if SCORES_FIRST and OWN == 0:
            other = 2 * pair + 1
            acc, acc_rest, row_max, row_sum = _start_other_values(
                smem, bars, other, acc, acc_rest, row_max, row_sum, pair, OWN, REST, STAGES, SCORES_FIRST
            )
            acc, acc_rest = _finish_other_values(bars, other, acc, acc_rest, OWN, REST, STAGES, SCORES_FIRST)
            pair += 1

        l_parts.index(OWN).store(row_sum)
        _barrier()
        mbarrier.arrive(l_full.index(OWN), count=1)
        mbarrier.wait(l_full.index(1 - OWN), turn & 1)
        total = row_sum + l_parts.index(1 - OWN).load(row_layout)
        acc, acc_rest = _scale(acc, acc_rest, 1.0 / total, REST)
        own_out = out + query * heads * WIDTH
        first_head = (work % tiles_h) * _BLOCK_H
        _store(own_out + OWN * _HALF, acc, first_head, heads, WIDTH, REST == 0)
        if REST:
            _store(own_out + 2 * _HALF + OWN * REST, acc_rest, first_head, heads, WIDTH, False)
        turn += 1  # noqa: SIM113 - kernels have no enumerate


@gluon.jit
def _store(out, acc, first_head, heads, WIDTH: gl.constexpr, WIDE: gl.constexpr):
    COLUMNS: gl.constexpr = acc.shape[1]
    if WIDE:
        # A thread has pairs of columns of a product; here eight, for 16-byte stores. Same warps and rows.
        layout: gl.constexpr = gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
            lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[_BLOCK_H, _HALF],
        )
        value = gl.convert_layout(acc.to(out.dtype.element_ty), layout)
    else:
        layout: gl.constexpr = acc.type.layout  # type: ignore[no-redef]
        value = acc.to(out.dtype.element_ty)
    head = first_head + gl.arange(0, _BLOCK_H, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    gl.store(out + (head * WIDTH)[:, None] + columns[None, :], value, mask=(head < heads)[:, None])


_NUMBERS = (
    *("works", "queries", "heads", "rows", "listed"),
    *("q_stride_batch", "q_stride_query", "q_stride_head", "kv_stride_batch", "kv_stride_row"),
    *("list_stride_batch", "list_stride_query"),
)


@gluon.jit(do_not_specialize=_NUMBERS)
def _sparse_attn_kernel(
    q_source, kv_source, out, sink_source, lists, scale_log2, works, queries, heads, rows, listed,
    q_stride_batch, q_stride_query, q_stride_head, kv_stride_batch, kv_stride_row,
    list_stride_batch, list_stride_query,
    WIDTH: gl.constexpr, REST: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SCORES_FIRST: gl.constexpr, STRIDE_UNIT: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_source.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_N, 16, 2)
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(dtype, [2, _BLOCK_H, _HALF], wide)
    kv_0 = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, _HALF], wide)
    kv_1 = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, _HALF], wide)
    if REST:
        q_rest = gl.allocate_shared_memory(dtype, [2, _BLOCK_H, REST], narrow)
        kv_rest_0 = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, REST], narrow)
        kv_rest_1 = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, REST], narrow)
    else:
        q_rest = q
        kv_rest_0 = kv_0
        kv_rest_1 = kv_1
    p = gl.allocate_shared_memory(dtype, [2 if SCORES_FIRST else 1, _BLOCK_H, BLOCK_N], p_layout)
    m = gl.allocate_shared_memory(gl.float32, [2, _BLOCK_H], vector)
    l_parts = gl.allocate_shared_memory(gl.float32, [2, _BLOCK_H], vector)
    flags = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], vector)
    smem = (q, q_rest, kv_0, kv_1, kv_rest_0, kv_rest_1, p, m, l_parts, flags)

    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    l_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=32 * _WARPS + 1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(p_empty.index(i), count=1)
        mbarrier.init(l_full.index(i), count=1)
    mbarrier.init(q_full, count=32 * _WARPS)
    mbarrier.init(q_empty, count=2)
    bars = (full, empty, q_full, q_empty, p_full, p_empty, l_full)

    strides = (
        q_stride_batch,
        q_stride_query,
        q_stride_head,
        kv_stride_batch,
        kv_stride_row,
        list_stride_batch,
        list_stride_query,
    )
    gl.warp_specialize(
        [
            (_consumer, (
                sink_source, out, smem, bars, works, heads, listed, scale_log2,
                0, WIDTH, REST, BLOCK_N, STAGES, SCORES_FIRST,
            )),
            (_consumer, (
                sink_source, out, smem, bars, works, heads, listed, scale_log2,
                1, WIDTH, REST, BLOCK_N, STAGES, SCORES_FIRST,
            )),
            (_producer, (
                q_source, kv_source, lists, smem, bars, works, queries, heads, rows, listed, strides,
                WIDTH, REST, BLOCK_N, STAGES, STRIDE_UNIT,
            )),
        ],
        [_WARPS, _WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def sparse_attn_gluon(
    q: Tensor,
    kv: Tensor,
    sink: Tensor,
    topk_idxs: Tensor,
    scale: float,
    config: GluonConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of q [b, m, h, d] over the listed rows of kv [b, n, d]; returns [b, m, h, d].

    q and kv must be such that ``hopper_limits.hopper_takes`` them; ``out`` must be contiguous. Nothing waits
    for the device.
    """
    batch, queries, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if out.numel() == 0:
        return out
    if topk_idxs.shape[2] == 0:
        return out.zero_()
    topk_idxs = topk_idxs if topk_idxs.stride(2) == 1 else topk_idxs.contiguous()
    config = config or DEFAULT[width]
    strides = (*q.stride()[:3], *kv.stride()[:2])
    works = batch * queries * triton.cdiv(heads, _BLOCK_H.value)
    programs = min(works, _multiprocessors(q.device)) if config.persistent else works
    _sparse_attn_kernel[(programs,)](
        q,
        kv,
        out,
        sink.contiguous(),
        topk_idxs,
        scale * _LOG2_E.value,
        works,
        queries,
        heads,
        kv.shape[1],
        topk_idxs.shape[2],
        *(stride // 8 for stride in strides),
        *topk_idxs.stride()[:2],
        num_warps=_WARPS.value,
        **constants(width, config),
    )
    return out


def constants(width: int, config: GluonConfig) -> dict[str, int | bool]:
    """What the kernel is compiled for."""
    return {
        "WIDTH": width,
        "REST": (width - 2 * _HALF.value) // 2,
        "BLOCK_N": config.block_n,
        "STAGES": config.stages,
        "SCORES_FIRST": config.scores_first,
        "STRIDE_UNIT": 8,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "PRODUCER_REGISTERS": config.producer_registers,
    }


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
