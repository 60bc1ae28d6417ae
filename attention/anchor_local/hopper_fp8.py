"""anchor_local in 8 bits for Hopper, in Gluon: the walk of ``hopper.py``, the sums of ``fp8_impl.py``.

Scores are int8 products, added up in int32. Weights stay in the registers where the scores were: to be an
operand of the product with the values they would have to change threads, so the columns of the transposed v
lie in the order in which the threads have the weights (``quantized(interleaved=True)``).

Knows quantised tensors and Gluon. Does not know patterns, nor how anything was quantised.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from attention.anchor_local.hopper import (
    GROUP_ROWS,
    HopperConfig,
    copy_tile,
    hide,
    item_at,
    key_tiles,
    matrix_descriptor,
    processors,
    tile_start,
    valid_keys,
)
from attention.anchor_local.quantizing import Quantized, quantized
from attention.anchor_local.schedule import schedule
from attention.anchor_local.value_columns import value_columns
from attention.layout import AnchorLocalLayout
from attention.triton_tiles import LOG2_E

CONFIGS = {64: HopperConfig(2, 128, 4, 240, True), 128: HopperConfig(2, 128, 4, 240, True)}
"""By channels."""
# Weights lie in 0 .. 1; times 2 to this most of them are normal numbers of e4m3, whose largest is 448.
_WEIGHT_BITS = gl.constexpr(8.0)
# Added to the bits of an integer below 2^22 it gives those of the float 1.5 * 2^23 + integer.
_FLOAT_BITS = gl.constexpr(0x4B400000)


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, full, empty, items, starts, queries, tokens, heads, group,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """The copying warp; of v it reads tiles of the transposed matrix, and the second copy for a segment."""
    step = 0
    turn = 0
    for index in range(gl.load(starts + gl.program_id(0)), gl.load(starts + gl.program_id(0) + 1)):
        begin, _, key_begin, key_end, first, batch, head, value_begin = item_at(items, index)
        first_whole, whole, first_rest, _, count = key_tiles(key_begin, key_end, first, BLOCK_N)
        mbarrier.wait(empty.index(2 * STAGES), (turn & 1) ^ 1)
        mbarrier.expect(full.index(2 * STAGES), GROUPS * q_desc.block_type.nbytes)
        for i in gl.static_range(GROUPS):
            copy_tile(
                q_desc,
                [batch * queries + begin + i * 64, head * HEAD_DIM],
                full.index(2 * STAGES),
                q_smem.index(i),
            )
        column = (head // group) * HEAD_DIM
        channel = batch * (heads // group) * HEAD_DIM + column
        for i in range(count):
            row = batch * tokens + tile_start(i, key_begin, first_whole, whole, first_rest, BLOCK_N)
            token = tile_start(i, value_begin, first_whole, whole, first_rest, BLOCK_N)
            stage = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), k_desc.block_type.nbytes)
            copy_tile(k_desc, [row, column], full.index(stage), k_smem.index(stage))
            mbarrier.wait(empty.index(STAGES + stage), phase)
            mbarrier.expect(full.index(STAGES + stage), v_desc.block_type.nbytes)
            copy_tile(v_desc, [channel, token], full.index(STAGES + stage), v_smem.index(stage))
            step += 1
        turn += 1  # noqa: SIM113


@gluon.jit
def _softmax(scores, row_scale, row_max):
    """Weights << _WEIGHT_BITS, what earlier sums shrink by, and the new maximum, for ``scores`` + 1.5 * 2^23.

    That constant goes into the maximum too, so it is in no difference.
    """
    new_max = gl.maximum(row_max, gl.max(scores, 1) * row_scale)
    weights = gl.exp2(scores * row_scale[:, None] - (new_max - _WEIGHT_BITS)[:, None])
    return weights, gl.exp2(row_max - new_max), new_max


@gluon.jit
def _as_floats(scores):
    """float32 of int32 below 2^22, plus 1.5 * 2^23: an addition, where a conversion would take longer."""
    return (scores + _FLOAT_BITS).to(gl.float32, bitcast=True)


@gluon.jit
def _as_operand(weights, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """e4m3 of the weights, each in the thread where it was; columns interleaved."""
    p = weights.to(gl.float8e4nv)
    p = gl.reshape(p, [64, BLOCK_N // 16, 2, 4, 2])
    p = gl.reshape(gl.permute(p, (0, 1, 3, 2, 4)), [64, BLOCK_N])
    return gl.convert_layout(p, layout)


@gluon.jit
def _attend(
    out, q_smem, k_smem, v_smem, full, empty, items, starts, q_scale, k_scale, v_scale,
    scale_log2, queries, heads, group, out_stride_batch, out_stride_row, out_stride_head,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """One group: 64 rows of every tile of queries."""
    ROWS: gl.constexpr = 64
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 32]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=4)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    if OVERLAP:
        pin = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    no_scores = gl.full([ROWS, BLOCK_N], 0, gl.int32, layout=s_layout)
    q = q_smem.index(GROUP)
    step = 0
    turn = 0
    mine = gl.load(starts + gl.program_id(0))
    last = gl.load(starts + gl.program_id(0) + 1) - 1
    begin, end, key_begin, key_end, first, batch, head, _values = item_at(items, mine)
    for index in range(mine, last + 1):
        # Read now what the next item is, so that nobody waits for it then.
        coming = item_at(items, gl.minimum(index + 1, last))
        _first_whole, whole, first_rest, second_rest, count = key_tiles(key_begin, key_end, first, BLOCK_N)
        kv_batch_head = batch * (heads // group) + head // group
        q_rows = begin + GROUP * ROWS + gl.arange(0, ROWS, layout=s_rows)
        at = q_scale + (batch * heads + head).to(gl.int64) * queries + q_rows
        row_scale = (
            gl.load(at, mask=q_rows < queries, other=1.0) * gl.load(k_scale + kv_batch_head) * scale_log2
        )
        acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, layout=o_layout)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=s_rows)

        # The first tile has nothing to overlap with.
        mbarrier.wait(full.index(2 * STAGES), turn & 1)
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        running = warpgroup_mma(
            q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        scores = _as_floats(warpgroup_mma_wait(0, deps=[running]))
        mbarrier.arrive(empty.index(stage), count=1)
        scores = hide(scores, valid_keys(0, whole, first_rest, second_rest, BLOCK_N), BLOCK_N, s_layout)
        weights, decay, row_max = _softmax(scores, row_scale, row_max)
        row_sum = gl.sum(weights, 1)
        for i in range(1, count):
            stage = (step + 1) % STAGES
            mbarrier.wait(full.index(stage), ((step + 1) // STAGES) & 1)
            running = warpgroup_mma(
                q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            value_stage = step % STAGES
            mbarrier.wait(full.index(STAGES + value_stage), (step // STAGES) & 1)
            p = _as_operand(weights, BLOCK_N, p_layout)
            sums = warpgroup_mma(p, v_smem.index(value_stage).permute((1, 0)), acc, is_async=True)
            scores = _as_floats(warpgroup_mma_wait(1, deps=[running]))
            mbarrier.arrive(empty.index(stage), count=1)
            if i >= whole:
                scores = hide(
                    scores, valid_keys(i, whole, first_rest, second_rest, BLOCK_N), BLOCK_N, s_layout
                )
            weights, decay, row_max = _softmax(scores, row_scale, row_max)
            row_sum = row_sum * decay + gl.sum(weights, 1)
            if OVERLAP:
                pin.store(row_sum)
            # That the weights pass through the wait keeps the compiler from computing them after it.
            acc, weights, row_sum = warpgroup_mma_wait(0, deps=[sums, weights, row_sum])
            mbarrier.arrive(empty.index(STAGES + value_stage), count=1)
            acc = acc * gl.convert_layout(decay, o_rows)[:, None]
            step += 1
        mbarrier.arrive(empty.index(2 * STAGES), count=1)
        value_stage = step % STAGES
        mbarrier.wait(full.index(STAGES + value_stage), (step // STAGES) & 1)
        p = _as_operand(weights, BLOCK_N, p_layout)
        sums = warpgroup_mma(p, v_smem.index(value_stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(STAGES + value_stage), count=1)
        step += 1
        turn += 1  # noqa: SIM113

        columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, o_layout))
        shares = gl.load(v_scale + kv_batch_head * HEAD_DIM + columns)
        acc = acc * gl.convert_layout(1.0 / row_sum, o_rows)[:, None] * shares[None, :]
        rows = begin + GROUP * ROWS + gl.arange(0, ROWS, layout=o_rows)
        base = out + batch.to(gl.int64) * out_stride_batch + head.to(gl.int64) * out_stride_head
        gl.store(
            base + rows.to(gl.int64)[:, None] * out_stride_row + columns[None, :],
            acc.to(out.dtype.element_ty),
            mask=(rows < end)[:, None],
        )
        begin, end, key_begin, key_end, first, batch, head, _values = coming


@gluon.jit(do_not_specialize=["queries", "tokens", "heads", "group", "out_stride_batch"])
def _kernel(
    q_desc, k_desc, v_desc, q_scale, k_scale, v_scale, out, items, starts, scale_log2,
    queries, tokens, heads, group,
    out_stride_batch, out_stride_row, out_stride_head,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, 64, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, HEAD_DIM, BLOCK_N], v_desc.layout)
    # Tiles of keys, tiles of values, queries.
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES + 1):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (
                    out, q_smem, k_smem, v_smem, full, empty, items, starts, q_scale, k_scale, v_scale,
                    scale_log2, queries, heads, group, out_stride_batch, out_stride_row, out_stride_head,
                    HEAD_DIM, BLOCK_N, STAGES, 0, OVERLAP,
                )),
                (_attend, (
                    out, q_smem, k_smem, v_smem, full, empty, items, starts, q_scale, k_scale, v_scale,
                    scale_log2, queries, heads, group, out_stride_batch, out_stride_row, out_stride_head,
                    HEAD_DIM, BLOCK_N, STAGES, 1, OVERLAP,
                )),
                (_copy, (
                    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, full, empty, items, starts,
                    queries, tokens, heads, group, HEAD_DIM, BLOCK_N, STAGES, GROUPS,
                )),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (
                    out, q_smem, k_smem, v_smem, full, empty, items, starts, q_scale, k_scale, v_scale,
                    scale_log2, queries, heads, group, out_stride_batch, out_stride_row, out_stride_head,
                    HEAD_DIM, BLOCK_N, STAGES, 0, OVERLAP,
                )),
                (_attend, (
                    out, q_smem, k_smem, v_smem, full, empty, items, starts, q_scale, k_scale, v_scale,
                    scale_log2, queries, heads, group, out_stride_batch, out_stride_row, out_stride_head,
                    HEAD_DIM, BLOCK_N, STAGES, 1, OVERLAP,
                )),
                (_attend, (
                    out, q_smem, k_smem, v_smem, full, empty, items, starts, q_scale, k_scale, v_scale,
                    scale_log2, queries, heads, group, out_stride_batch, out_stride_row, out_stride_head,
                    HEAD_DIM, BLOCK_N, STAGES, 2, OVERLAP,
                )),
                (_copy, (
                    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, full, empty, items, starts,
                    queries, tokens, heads, group, HEAD_DIM, BLOCK_N, STAGES, GROUPS,
                )),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def anchor_local_hopper_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnchorLocalLayout,
    scale: float,
    config: HopperConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of ordered q [B, M, H, D] over ordered k, v [B, N, KV, D]; shape and dtype of q.

    D is 64 or 128, the GPU one of Hopper's.
    """
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    narrow = quantized(q, k, v, value_columns(layout, q.device), interleaved=True)
    return attend_interleaved(narrow, q, layout, scale, config, out)


def attend_interleaved(
    narrow: Quantized,
    q: Tensor,
    layout: AnchorLocalLayout,
    scale: float,
    config: HopperConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The same on tensors quantised with ``interleaved=True``; of q only shape and dtype count."""
    batch, queries, heads, head_dim = q.shape
    tokens, kv_heads = narrow.k.shape[1:3]
    config = config or CONFIGS[head_dim]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    work = schedule(
        layout, batch, heads, config.groups * GROUP_ROWS, config.block_n, processors(q.device), q.device
    )
    width = narrow.v.shape[3]
    q_tile, k_tile, v_tile = [GROUP_ROWS, head_dim], [config.block_n, head_dim], [head_dim, config.block_n]
    _kernel[(work.programs,)](
        matrix_descriptor(narrow.q, [batch * queries, heads * head_dim], [heads * head_dim, 1], q_tile),
        matrix_descriptor(narrow.k, [batch * tokens, kv_heads * head_dim], [kv_heads * head_dim, 1], k_tile),
        matrix_descriptor(narrow.v, [batch * kv_heads * head_dim, width], [width, 1], v_tile),
        narrow.q_scale,
        narrow.k_scale,
        narrow.v_scale,
        out,
        work.items,
        work.starts,
        scale * LOG2_E,
        queries,
        tokens,
        heads,
        heads // kv_heads,
        *out.stride()[:3],
        HEAD_DIM=head_dim,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        GROUPS=config.groups,
        REGISTERS=config.registers,
        OVERLAP=config.overlap,
        num_warps=4,
    )
    return out
