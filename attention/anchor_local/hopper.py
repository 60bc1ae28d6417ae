"""anchor_local for Hopper's warp groups, in Gluon: what ``triton_impl.py`` computes, laid out by hand.

A program stays on its multiprocessor and takes tile after tile of queries, as its schedule says. One warp
copies queries, keys and values into rings of shared memory, as far ahead as they have room, also into the
next tile. Each group of four warps has 64 queries. It multiplies the weights of a tile of keys with its
values while it computes scores and softmax of the next one, and while a group computes a softmax another has
the matrix units.

Knows layouts and Gluon. Does not know patterns.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attention.anchor_local.schedule import schedule
from attention.hopper_tiles import (
    GROUP_ROWS,
    PIN_LAYOUT,
    HopperConfig,
    copy_keys_and_values,
    copy_tile,
    descriptor,
    first_scores,
    first_softmax,
    hide,
    last_sums,
    processors,
    product_layout,
    scores_beside_sums,
    softmax_beside_sums,
    store_rows,
)
from attention.layout import AnchorLocalLayout
from attention.triton_tiles import LOG2_E, fits_descriptor

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
            copy_tile(
                q_desc,
                [batch * queries + begin + i * 64, head * HEAD_DIM],
                full.index(2 * STAGES),
                q_smem.index(i),
            )
        column = (head // group) * HEAD_DIM
        for i in range(count):
            row = batch * tokens + _tile_start(i, key_begin, first_whole, whole, first_rest, BLOCK_N)
            copy_keys_and_values(k_desc, v_desc, row, column, k_smem, v_smem, full, empty, step, STAGES)
            step += 1
        turn += 1  # noqa: SIM113


@gluon.jit
def _attend(
    out, q_smem, k_smem, v_smem, full, empty, items, starts, scale_log2,
    out_stride_batch, out_stride_row, out_stride_head,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """One group: 64 rows of every tile of queries."""
    ROWS: gl.constexpr = 64
    s_layout: gl.constexpr = product_layout(BLOCK_N)
    o_layout: gl.constexpr = product_layout(HEAD_DIM)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    pin = None
    if OVERLAP:
        pin = gl.allocate_shared_memory(gl.float32, [ROWS], PIN_LAYOUT)
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
        scores = first_scores(q, no_scores, k_smem, full, empty, step, STAGES)
        scores = hide(scores, _valid_keys(0, whole, first_rest, second_rest, BLOCK_N), BLOCK_N, s_layout)
        weights, row_max, row_sum = first_softmax(
            scores, row_max, scale_log2, k_smem.dtype, o_layout, OVERLAP
        )
        for i in range(1, count):
            scores, sums, p = scores_beside_sums(
                q, no_scores, weights, acc, k_smem, v_smem, full, empty, step, o_layout, STAGES, OVERLAP
            )
            if i >= whole:
                scores = hide(
                    scores, _valid_keys(i, whole, first_rest, second_rest, BLOCK_N), BLOCK_N, s_layout
                )
            weights, acc, row_max, row_sum = softmax_beside_sums(
                scores, sums, p, row_max, row_sum, scale_log2, pin, empty, step, o_layout, STAGES, OVERLAP
            )
            step += 1
        mbarrier.arrive(empty.index(2 * STAGES), count=1)
        acc = last_sums(weights, acc, v_smem, full, empty, step, o_layout, STAGES, OVERLAP)
        step += 1
        turn += 1  # noqa: SIM113

        rows = begin + GROUP * ROWS + gl.arange(0, ROWS, layout=o_rows)
        base = out + batch.to(gl.int64) * out_stride_batch + head.to(gl.int64) * out_stride_head
        store_rows(acc, row_sum, base, rows, end, out_stride_row, HEAD_DIM, o_layout)
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
        layout, batch, heads, config.groups * GROUP_ROWS, config.block_n, processors(q.device), q.device
    )
    _kernel[(work.programs,)](
        descriptor(q, GROUP_ROWS),
        descriptor(k, config.block_n),
        descriptor(v, config.block_n),
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
