"""anchor_local for Hopper's warp groups, in Gluon: what ``triton_impl.py`` computes, laid out by hand.

A program stays on its multiprocessor and takes tile after tile of queries, as its schedule says. One warp
copies queries, keys and values into rings of shared memory, as far ahead as they have room, also into the
next tile. Each group of four warps has 64 queries. It multiplies the weights of a tile of keys with its
values while it computes scores and softmax of the next one, and while a group computes a softmax another has
the matrix units.

Knows layouts and Gluon. Does not know patterns.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention.anchor_local.schedule import schedule
from attention.layout import AnchorLocalLayout
from attention.triton_tiles import LOG2_E, fits_descriptor

GROUP_ROWS = 64
# Triton 3.9 has another name for it than 3.6.
_copy_tile: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@dataclass(frozen=True, slots=True)
class HopperConfig:
    """Shape of the work of a program.

    Attributes:
        groups: of four warps and 64 queries each; 2 or 3.
        block_n: keys of a tile.
        stages: tiles of keys, and of values, that there is room for.
        registers: of a thread of a group; a multiple of 8.
        overlap: a group's product with the values runs beside its own softmax, not only beside those of
            others; this costs registers, which three groups do not have.
    """

    groups: int
    block_n: int
    stages: int
    registers: int
    overlap: bool


CONFIGS = {
    64: HopperConfig(groups=3, block_n=128, stages=2, registers=160, overlap=False),
    128: HopperConfig(groups=2, block_n=128, stages=2, registers=240, overlap=True),
}
"""By head_dim; measured on an H200 (docs/notes.md), so that no request waits for tuning."""


@gluon.jit
def _item_at(items, index):
    """The fields of an item of the schedule."""
    item = items + index * 7
    begin = gl.load(item)
    end = gl.load(item + 1)
    key_begin = gl.load(item + 2)
    key_end = gl.load(item + 3)
    first = gl.load(item + 4)
    batch = gl.load(item + 5)
    head = gl.load(item + 6)
    return begin, end, key_begin, key_end, first, batch, head


@gluon.jit
def _key_tiles(key_begin, key_end, first, BLOCK_N: gl.constexpr):
    """Whole tiles of the first range and of both, what is left of each range, and the number of all tiles."""
    first_whole = first // BLOCK_N
    second_whole = (key_end - key_begin) // BLOCK_N
    first_rest = first - first_whole * BLOCK_N
    second_rest = key_end - key_begin - second_whole * BLOCK_N
    whole = first_whole + second_whole
    count = whole + gl.where(first_rest > 0, 1, 0) + gl.where(second_rest > 0, 1, 0)
    return first_whole, whole, first_rest, second_rest, count


@gluon.jit
def _tile_start(i, key_begin, first_whole, whole, first_rest, BLOCK_N: gl.constexpr):
    """First key of tile number i: whole tiles of both ranges, then what is left of each."""
    is_first = (i < first_whole) | ((i == whole) & (first_rest > 0))
    inside = gl.where(i < whole, i, gl.where(is_first, first_whole, whole))
    return gl.where(is_first, inside * BLOCK_N, key_begin + (inside - first_whole) * BLOCK_N)


@gluon.jit
def _valid_keys(i, whole, first_rest, second_rest, BLOCK_N: gl.constexpr):
    """How many keys of tile number i count."""
    rest = gl.where((i == whole) & (first_rest > 0), first_rest, second_rest)
    return gl.where(i < whole, BLOCK_N, rest)


@gluon.jit
def _hide(scores, valid, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Scores of keys that do not count become -inf."""
    position = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    return gl.where((position < valid)[None, :], scores, float("-inf"))


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, full, empty, items, starts, queries, tokens, group,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    step = 0
    turn = 0
    for index in range(gl.load(starts + gl.program_id(0)), gl.load(starts + gl.program_id(0) + 1)):
        begin, _, key_begin, key_end, first, batch, head = _item_at(items, index)
        first_whole, whole, first_rest, _, count = _key_tiles(key_begin, key_end, first, BLOCK_N)
        mbarrier.wait(empty.index(2 * STAGES), (turn & 1) ^ 1)
        mbarrier.expect(full.index(2 * STAGES), GROUPS * q_desc.block_type.nbytes)
        for i in gl.static_range(GROUPS):
            _copy_tile(
                q_desc,
                [batch * queries + begin + i * 64, head * HEAD_DIM],
                full.index(2 * STAGES),
                q_smem.index(i),
            )
        column = (head // group) * HEAD_DIM
        for i in range(count):
            row = batch * tokens + _tile_start(i, key_begin, first_whole, whole, first_rest, BLOCK_N)
            stage = step % STAGES
            phase = ((step // STAGES) & 1) ^ 1
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), k_desc.block_type.nbytes)
            _copy_tile(k_desc, [row, column], full.index(stage), k_smem.index(stage))
            mbarrier.wait(empty.index(STAGES + stage), phase)
            mbarrier.expect(full.index(STAGES + stage), v_desc.block_type.nbytes)
            _copy_tile(v_desc, [row, column], full.index(STAGES + stage), v_smem.index(stage))
            step += 1
        turn += 1  # noqa: SIM113


@gluon.jit
def _softmax(scores, row_max, scale_log2):
    """Weights, what earlier sums shrink by, and the new maximum."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_max[:, None])
    return weights, gl.exp2(row_max - new_max), new_max


@gluon.jit
def _attend(
    out, q_smem, k_smem, v_smem, full, empty, items, starts, scale_log2,
    out_stride_batch, out_stride_row, out_stride_head,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """One group: 64 rows of every tile of queries."""
    ROWS: gl.constexpr = 64
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = k_smem.dtype
    if OVERLAP:
        # Written, never read: ptxas leaves a wait behind a store, and the store needs the softmax to be done.
        # Without it the wait for the product with the values comes before the softmax it should run beside.
        pin = gl.allocate_shared_memory(gl.float32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    no_scores = gl.full([ROWS, BLOCK_N], 0.0, gl.float32, layout=s_layout)
    q = q_smem.index(GROUP)
    step = 0
    turn = 0
    mine = gl.load(starts + gl.program_id(0))
    last = gl.load(starts + gl.program_id(0) + 1) - 1
    begin, end, key_begin, key_end, first, batch, head = _item_at(items, mine)
    for index in range(mine, last + 1):
        # Read now what the next item is, so that nobody waits for it then.
        coming = _item_at(items, gl.minimum(index + 1, last))
        _first_whole, whole, first_rest, second_rest, count = _key_tiles(key_begin, key_end, first, BLOCK_N)
        acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, layout=o_layout)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=s_rows)

        # The first tile has nothing to overlap with.
        mbarrier.wait(full.index(2 * STAGES), turn & 1)
        stage = step % STAGES
        mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        running = warpgroup_mma(
            q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        scores = warpgroup_mma_wait(0, deps=[running])
        mbarrier.arrive(empty.index(stage), count=1)
        scores = _hide(scores, _valid_keys(0, whole, first_rest, second_rest, BLOCK_N), BLOCK_N, s_layout)
        weights, decay, row_max = _softmax(scores, row_max, scale_log2)
        row_sum = gl.sum(weights, 1)
        if not OVERLAP:
            p = gl.convert_layout(weights.to(dtype), p_layout)
        for i in range(1, count):
            stage = (step + 1) % STAGES
            mbarrier.wait(full.index(stage), ((step + 1) // STAGES) & 1)
            running = warpgroup_mma(
                q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            value_stage = step % STAGES
            mbarrier.wait(full.index(STAGES + value_stage), (step // STAGES) & 1)
            if OVERLAP:
                p = gl.convert_layout(weights.to(dtype), p_layout)
            sums = warpgroup_mma(p, v_smem.index(value_stage), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[running])
            mbarrier.arrive(empty.index(stage), count=1)
            if i >= whole:
                scores = _hide(
                    scores, _valid_keys(i, whole, first_rest, second_rest, BLOCK_N), BLOCK_N, s_layout
                )
            weights, decay, row_max = _softmax(scores, row_max, scale_log2)
            row_sum = row_sum * decay + gl.sum(weights, 1)
            if OVERLAP:
                pin.store(row_sum)
                acc, _p, weights, row_sum = warpgroup_mma_wait(0, deps=[sums, p, weights, row_sum])
            else:
                next_p = gl.convert_layout(weights.to(dtype), p_layout)
                acc, _p, p, row_sum = warpgroup_mma_wait(0, deps=[sums, p, next_p, row_sum])
            mbarrier.arrive(empty.index(STAGES + value_stage), count=1)
            acc = acc * gl.convert_layout(decay, o_rows)[:, None]
            step += 1
        mbarrier.arrive(empty.index(2 * STAGES), count=1)
        value_stage = step % STAGES
        mbarrier.wait(full.index(STAGES + value_stage), (step // STAGES) & 1)
        if OVERLAP:
            p = gl.convert_layout(weights.to(dtype), p_layout)
        sums = warpgroup_mma(p, v_smem.index(value_stage), acc, is_async=True)
        acc, _p = warpgroup_mma_wait(0, deps=[sums, p])
        mbarrier.arrive(empty.index(STAGES + value_stage), count=1)
        step += 1
        turn += 1  # noqa: SIM113

        acc = acc * gl.convert_layout(1.0 / row_sum, o_rows)[:, None]
        rows = begin + GROUP * ROWS + gl.arange(0, ROWS, layout=o_rows)
        columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, o_layout))
        base = out + batch.to(gl.int64) * out_stride_batch + head.to(gl.int64) * out_stride_head
        gl.store(
            base + rows.to(gl.int64)[:, None] * out_stride_row + columns[None, :],
            acc.to(dtype),
            mask=(rows < end)[:, None],
        )
        begin, end, key_begin, key_end, first, batch, head = coming


@gluon.jit(do_not_specialize=["queries", "tokens", "group", "out_stride_batch"])
def _kernel(
    q_desc, k_desc, v_desc, out, items, starts, scale_log2, queries, tokens, group,
    out_stride_batch, out_stride_row, out_stride_head,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [GROUPS, 64, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], v_desc.layout)
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
                    out, q_smem, k_smem, v_smem, full, empty, items, starts, scale_log2,
                    out_stride_batch, out_stride_row, out_stride_head, HEAD_DIM, BLOCK_N, STAGES, 0, OVERLAP,
                )),
                (_attend, (
                    out, q_smem, k_smem, v_smem, full, empty, items, starts, scale_log2,
                    out_stride_batch, out_stride_row, out_stride_head, HEAD_DIM, BLOCK_N, STAGES, 1, OVERLAP,
                )),
                (_copy, (
                    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, full, empty, items, starts,
                    queries, tokens, group, HEAD_DIM, BLOCK_N, STAGES, GROUPS,
                )),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (
                    out, q_smem, k_smem, v_smem, full, empty, items, starts, scale_log2,
                    out_stride_batch, out_stride_row, out_stride_head, HEAD_DIM, BLOCK_N, STAGES, 0, OVERLAP,
                )),
                (_attend, (
                    out, q_smem, k_smem, v_smem, full, empty, items, starts, scale_log2,
                    out_stride_batch, out_stride_row, out_stride_head, HEAD_DIM, BLOCK_N, STAGES, 1, OVERLAP,
                )),
                (_attend, (
                    out, q_smem, k_smem, v_smem, full, empty, items, starts, scale_log2,
                    out_stride_batch, out_stride_row, out_stride_head, HEAD_DIM, BLOCK_N, STAGES, 2, OVERLAP,
                )),
                (_copy, (
                    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, full, empty, items, starts,
                    queries, tokens, group, HEAD_DIM, BLOCK_N, STAGES, GROUPS,
                )),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def anchor_local_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnchorLocalLayout,
    scale: float,
    config: HopperConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of ordered q [B, M, H, D] over ordered k, v [B, N, KV, D]; shape and dtype of q.

    D is 64 or 128, the dtype bfloat16 or float16, the GPU a Hopper. Tensors that no descriptor can describe
    (heads not side by side, rows not from multiples of 16 bytes) are copied.
    """
    q, k, v = (x if fits_descriptor(x) else x.contiguous() for x in (q, k, v))
    batch, queries, heads, head_dim = q.shape
    config = config or CONFIGS[head_dim]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    work = schedule(
        layout, batch, heads, config.groups * GROUP_ROWS, config.block_n, _processors(q.device), q.device
    )
    _kernel[(work.programs,)](
        _descriptor(q, GROUP_ROWS),
        _descriptor(k, config.block_n),
        _descriptor(v, config.block_n),
        out,
        work.items,
        work.starts,
        scale * LOG2_E,
        queries,
        k.shape[1],
        heads // k.shape[2],
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


def _processors(device: torch.device) -> int:
    """Multiprocessors of the GPU: as many programs run at a time."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
}


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of [B, N, H, D] for tiles of so many rows of one head."""
    batch, tokens, heads, head_dim = x.shape
    shape, strides, tile = [batch * tokens, heads * head_dim], [x.stride(1), 1], [rows, head_dim]
    swizzled = gl.NVMMASharedLayout.get_default_for(tile, _DTYPES[x.dtype])
    return TensorDescriptor(x, shape, strides, tile, swizzled)
