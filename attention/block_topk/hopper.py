"""block_topk for Hopper's warp groups, in Gluon: what ``triton_impl.py`` attends to, laid out by hand.

A program stays on its multiprocessor and takes tile after tile of queries of one box; which is next, a
counter in memory says. One warp reads from the lists which keys are next and copies them, their values and
the queries into rings of shared memory, as far ahead as they have room, also into the next tile. Groups of
four warps have 64 queries each; a group whose queries lie beyond the end of the box passes all tiles on.

Tiles of keys come in the order of ``triton_impl.py``: those that all see, whole tiles of the boxes that are
kept; then those that are not whole; then mean keys. Nothing waits for the device, and a call repeats bit by
bit.

Knows layouts, lists and Gluon. Does not know how boxes are chosen.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attention.block_topk.layout import BoxLayout
from attention.block_topk.query_items import query_items
from attention.block_topk.triton_impl import select
from attention.block_topk.triton_selection import KeyLists
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
from attention.triton_tiles import LOG2_E, fits_descriptor

CONFIGS = {
    64: HopperConfig(groups=3, block_n=128, stages=2, registers=160, overlap=False),
    128: HopperConfig(groups=2, block_n=128, stages=2, registers=240, overlap=True),
}
"""By head_dim; those that anchor_local runs well with. No others were tried."""

RECORD_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Triton 3.9 has another name for it than 3.6.
barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _item_at(items, index):
    """The fields of an item."""
    item = items + index * 6
    begin = gl.load(item)
    end = gl.load(item + 1)
    first = gl.load(item + 2)
    row = gl.load(item + 3)
    batch = gl.load(item + 4)
    head = gl.load(item + 5)
    return begin, end, first, row, batch, head


@gluon.jit
def _counts_of(counts, row):
    """How many tiles a row lists: whole ones, and those that are not. Row -1 lists none."""
    pair = counts + row.to(gl.int64) * 2
    return gl.load(pair, mask=row >= 0, other=0), gl.load(pair + 1, mask=row >= 0, other=0)


@gluon.jit
def _walk(first, row, listed_whole, listed_partial, boxes, BLOCK_N: gl.constexpr, REST: gl.constexpr):
    """Tiles of an item are numbered: whole ones of the first keys, whole ones that are listed, what is left
    of the first keys, those listed that are not whole, mean keys. Where each part ends."""
    first_whole = first // BLOCK_N
    whole = first_whole + listed_whole
    unlisted = whole + gl.where(first % BLOCK_N > 0, 1, 0)
    exact = unlisted + listed_partial
    count = exact
    if REST:
        count += gl.where(row >= 0, (boxes + BLOCK_N - 1) // BLOCK_N, 0)
    return first_whole, whole, unlisted, exact, count


@gluon.jit
def _tile_start(i, first_whole, whole, unlisted, exact, whole_list, partial_list, BLOCK_N: gl.constexpr):
    """First key of tile number i, or first mean key."""
    of_whole = gl.load(whole_list + (i - first_whole), mask=(i >= first_whole) & (i < whole), other=0)
    of_partial = gl.load(partial_list + (i - unlisted) * 2, mask=(i >= unlisted) & (i < exact), other=0)
    listed = gl.where(i < whole, of_whole, of_partial)
    is_listed = ((i >= first_whole) & (i < whole)) | (i >= unlisted)
    start = gl.where(is_listed, listed, gl.minimum(i, first_whole) * BLOCK_N)
    return gl.where(i < exact, start, (i - exact) * BLOCK_N)


@gluon.jit
def _listed_keys(i, unlisted, exact, partial_list):
    """How many keys of tile number i count, if it is listed as one that is not whole."""
    return gl.load(partial_list + (i - unlisted) * 2 + 1, mask=(i >= unlisted) & (i < exact), other=0)


@gluon.jit
def _valid_keys(i, listed, first, whole, unlisted, BLOCK_N: gl.constexpr):
    """How many keys of tile number i count; none of those of mean keys."""
    return gl.where(i < whole, BLOCK_N, gl.where(i < unlisted, first % BLOCK_N, listed))


@gluon.jit
def _bias(rest_bias, row, boxes, start, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """What is added to the scaled scores of a tile of mean keys, in units of log2."""
    box = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    return gl.load(rest_bias + row.to(gl.int64) * boxes + box, mask=box < boxes, other=float("-inf"))


@gluon.jit
def _write(records, place, value):
    """One number, by the one copying warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    records.index(place).store(gl.full([1], value, gl.int32, layout=layout))


@gluon.jit
def _read(records, place):
    """One number, by a group."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(records.index(place).load(layout), 0)


@gluon.jit
def _next(counter):
    """Number of the item that the program takes next; too high when all are taken."""
    return gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def _copy(
    q_desc, k_desc, v_desc, rest_k_desc, rest_v_desc, q_smem, k_smem, v_smem, records, full, empty,
    items, item_count, counter, whole_lists, partial_lists, counts, tokens, boxes, most_whole, most_partial,
    kv_heads, group,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    REST: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    index = _next(counter)
    begin, end, first, row, batch, head = _item_at(items, gl.minimum(index, item_count - 1))
    step = 0
    turn = 0
    while index < item_count:
        listed_whole, listed_partial = _counts_of(counts, row)
        slot = turn % 2
        mbarrier.wait(empty.index(2 * STAGES + slot), ((turn // 2) & 1) ^ 1)
        record = slot * 8
        _write(records, record + 0, begin)
        _write(records, record + 1, end)
        _write(records, record + 2, first)
        _write(records, record + 3, row)
        _write(records, record + 4, batch)
        _write(records, record + 5, head)
        _write(records, record + 6, listed_whole)
        _write(records, record + 7, listed_partial)
        barrier()  # all has been written before the barrier may open
        mbarrier.expect(full.index(2 * STAGES + slot), GROUPS * q_desc.block_type.nbytes)
        for i in gl.static_range(GROUPS):
            copy_tile(
                q_desc,
                [batch * tokens + begin + i * 64, head * HEAD_DIM],
                full.index(2 * STAGES + slot),
                q_smem.index(slot * GROUPS + i),
            )
        # Asked for now, so that nobody waits for it then.
        index = _next(counter)
        following = _item_at(items, gl.minimum(index, item_count - 1))
        first_whole, whole, unlisted, exact, count = _walk(
            first, row, listed_whole, listed_partial, boxes, BLOCK_N, REST
        )
        whole_list = whole_lists + row.to(gl.int64) * most_whole
        partial_list = partial_lists + row.to(gl.int64) * most_partial * 2
        kv_head = head // group
        coming = _tile_start(0, first_whole, whole, unlisted, exact, whole_list, partial_list, BLOCK_N)
        for i in range(exact):
            start = coming
            coming = _tile_start(
                i + 1, first_whole, whole, unlisted, exact, whole_list, partial_list, BLOCK_N
            )
            copy_keys_and_values(
                k_desc, v_desc, batch * tokens + start, kv_head * HEAD_DIM,
                k_smem, v_smem, full, empty, step, STAGES,
            )  # fmt: skip
            step += 1
        if REST:
            for i in range(count - exact):
                copy_keys_and_values(
                    rest_k_desc, rest_v_desc, (batch * kv_heads + kv_head) * boxes + i * BLOCK_N, 0,
                    k_smem, v_smem, full, empty, step, STAGES,
                )  # fmt: skip
                step += 1
        turn += 1
        begin, end, first, row, batch, head = following
    slot = turn % 2
    mbarrier.wait(empty.index(2 * STAGES + slot), ((turn // 2) & 1) ^ 1)
    _write(records, slot * 8 + 1, 0)
    barrier()
    mbarrier.arrive(full.index(2 * STAGES + slot), count=1)


@gluon.jit
def _take(records, full, turn, STAGES: gl.constexpr):
    """Of a group: its next item, and how many tiles that lists. One that ends at 0 means that all is done."""
    slot = turn % 2
    mbarrier.wait(full.index(2 * STAGES + slot), (turn // 2) & 1)
    record = slot * 8
    begin, end, first, row = (
        _read(records, record + 0),
        _read(records, record + 1),
        _read(records, record + 2),
        _read(records, record + 3),
    )
    batch, head = _read(records, record + 4), _read(records, record + 5)
    return begin, end, first, row, batch, head, _read(records, record + 6), _read(records, record + 7)


@gluon.jit
def _pass_on(full, empty, step, count, STAGES: gl.constexpr):
    """Of a group without queries: give back all tiles of an item, so that the others get more."""
    for _ in range(count):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.wait(full.index(STAGES + stage), phase)
        mbarrier.arrive(empty.index(STAGES + stage), count=1)
        step += 1
    return step


@gluon.jit
def _attend(
    out, q_smem, k_smem, v_smem, records, full, empty, partial_lists, rest_bias, scale_log2,
    boxes, most_partial, out_stride_batch, out_stride_row, out_stride_head,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    GROUP: gl.constexpr, OVERLAP: gl.constexpr, REST: gl.constexpr,
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
    step = 0
    turn = 0
    begin, end, first, row, batch, head, listed_whole, listed_partial = _take(records, full, turn, STAGES)
    while end > 0:
        _first_whole, whole, unlisted, exact, count = _walk(
            first, row, listed_whole, listed_partial, boxes, BLOCK_N, REST
        )
        slot = turn % 2
        if begin + GROUP * ROWS < end:
            q = q_smem.index(slot * GROUPS + GROUP)
            partial_list = partial_lists + row.to(gl.int64) * most_partial * 2
            acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, layout=o_layout)
            row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=s_rows)
            listed = _listed_keys(0, unlisted, exact, partial_list)
            valid = _valid_keys(0, listed, first, whole, unlisted, BLOCK_N)
            scores = first_scores(q, no_scores, k_smem, full, empty, step, STAGES)
            listed = _listed_keys(1, unlisted, exact, partial_list)
            scores = hide(scores, valid, BLOCK_N, s_layout)
            weights, row_max, row_sum = first_softmax(
                scores, row_max, scale_log2, k_smem.dtype, o_layout, OVERLAP
            )
            for i in range(1, exact):
                valid = _valid_keys(i, listed, first, whole, unlisted, BLOCK_N)
                listed = _listed_keys(i + 1, unlisted, exact, partial_list)
                scores, sums, p = scores_beside_sums(
                    q, no_scores, weights, acc, k_smem, v_smem, full, empty, step, o_layout, STAGES, OVERLAP
                )
                if i >= whole:
                    scores = hide(scores, valid, BLOCK_N, s_layout)
                weights, acc, row_max, row_sum = softmax_beside_sums(
                    scores, sums, p, row_max, row_sum, scale_log2, pin, empty, step, o_layout, STAGES, OVERLAP
                )
                step += 1
            if REST:
                for i in range(exact, count):
                    scores, sums, p = scores_beside_sums(
                        q, no_scores, weights, acc, k_smem, v_smem, full, empty, step, o_layout, STAGES,
                        OVERLAP,
                    )  # fmt: skip
                    bias = _bias(rest_bias, row, boxes, (i - exact) * BLOCK_N, BLOCK_N, s_layout)
                    weights, acc, row_max, row_sum = softmax_beside_sums(
                        scores + (bias / scale_log2)[None, :], sums, p, row_max, row_sum, scale_log2, pin,
                        empty, step, o_layout, STAGES, OVERLAP,
                    )  # fmt: skip
                    step += 1
            mbarrier.arrive(empty.index(2 * STAGES + slot), count=1)
            acc = last_sums(weights, acc, v_smem, full, empty, step, o_layout, STAGES, OVERLAP)
            step += 1
            rows = begin + GROUP * ROWS + gl.arange(0, ROWS, layout=o_rows)
            base = out + batch.to(gl.int64) * out_stride_batch + head.to(gl.int64) * out_stride_head
            store_rows(acc, row_sum, base, rows, end, out_stride_row, HEAD_DIM, o_layout)
        else:
            mbarrier.arrive(empty.index(2 * STAGES + slot), count=1)
            step = _pass_on(full, empty, step, count, STAGES)
        turn += 1
        begin, end, first, row, batch, head, listed_whole, listed_partial = _take(records, full, turn, STAGES)


# A new length must not compile a new kernel, so nothing that depends on it is specialised.
_LENGTHS = ("item_count", "tokens", "boxes", "most_whole", "most_partial", "out_stride_batch")


@gluon.jit(do_not_specialize=[*_LENGTHS, "kv_heads", "group"])
def _kernel(
    q_desc, k_desc, v_desc, rest_k_desc, rest_v_desc, out, items, item_count, counter, whole_lists,
    partial_lists, counts, rest_bias, scale_log2, tokens, boxes, most_whole, most_partial, kv_heads, group,
    out_stride_batch, out_stride_row, out_stride_head,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr, OVERLAP: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2 * GROUPS, 64, HEAD_DIM], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], v_desc.layout)
    records = gl.allocate_shared_memory(gl.int32, [2 * 8, 1], RECORD_LAYOUT)
    # Tiles of keys, tiles of values, and twice queries with their record.
    full = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES + 2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * STAGES + 2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (
                    out, q_smem, k_smem, v_smem, records, full, empty, partial_lists, rest_bias, scale_log2,
                    boxes, most_partial, out_stride_batch, out_stride_row, out_stride_head,
                    HEAD_DIM, BLOCK_N, STAGES, GROUPS, 0, OVERLAP, REST,
                )),
                (_attend, (
                    out, q_smem, k_smem, v_smem, records, full, empty, partial_lists, rest_bias, scale_log2,
                    boxes, most_partial, out_stride_batch, out_stride_row, out_stride_head,
                    HEAD_DIM, BLOCK_N, STAGES, GROUPS, 1, OVERLAP, REST,
                )),
                (_copy, (
                    q_desc, k_desc, v_desc, rest_k_desc, rest_v_desc, q_smem, k_smem, v_smem, records, full,
                    empty, items, item_count, counter, whole_lists, partial_lists, counts, tokens, boxes,
                    most_whole, most_partial, kv_heads, group, HEAD_DIM, BLOCK_N, STAGES, GROUPS, REST,
                )),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (
                    out, q_smem, k_smem, v_smem, records, full, empty, partial_lists, rest_bias, scale_log2,
                    boxes, most_partial, out_stride_batch, out_stride_row, out_stride_head,
                    HEAD_DIM, BLOCK_N, STAGES, GROUPS, 0, OVERLAP, REST,
                )),
                (_attend, (
                    out, q_smem, k_smem, v_smem, records, full, empty, partial_lists, rest_bias, scale_log2,
                    boxes, most_partial, out_stride_batch, out_stride_row, out_stride_head,
                    HEAD_DIM, BLOCK_N, STAGES, GROUPS, 1, OVERLAP, REST,
                )),
                (_attend, (
                    out, q_smem, k_smem, v_smem, records, full, empty, partial_lists, rest_bias, scale_log2,
                    boxes, most_partial, out_stride_batch, out_stride_row, out_stride_head,
                    HEAD_DIM, BLOCK_N, STAGES, GROUPS, 2, OVERLAP, REST,
                )),
                (_copy, (
                    q_desc, k_desc, v_desc, rest_k_desc, rest_v_desc, q_smem, k_smem, v_smem, records, full,
                    empty, items, item_count, counter, whole_lists, partial_lists, counts, tokens, boxes,
                    most_whole, most_partial, kv_heads, group, HEAD_DIM, BLOCK_N, STAGES, GROUPS, REST,
                )),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def block_topk_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BoxLayout,
    *,
    top_k: float,
    pooled_rest: bool,
    scale: float,
    tally: Tensor | None,
    config: HopperConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of ordered q [B, N, H, D] over ordered k, v [B, N, KV, D]; returns [B, N, H, D].

    D is 64 or 128, the dtype bfloat16 or float16, the GPU a Hopper. Tensors that no descriptor can describe
    (heads not side by side, rows not from multiples of 16 bytes) are copied.
    """
    q, k, v = (x if fits_descriptor(x) else x.contiguous() for x in (q, k, v))
    config = config or CONFIGS[q.shape[3]]
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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BoxLayout,
    lists: KeyLists | None,
    rest: tuple[Tensor, Tensor] | None,
    *,
    scale: float,
    config: HopperConfig,
    out: Tensor | None = None,
) -> Tensor:
    """The attention kernel alone, on lists for tiles of the config's block_n; as ``block_topk_hopper``."""
    batch, tokens, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    items = query_items(layout, batch, heads, config.groups * GROUP_ROWS, q.device)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    kv_tiles = descriptor(k, config.block_n), descriptor(v, config.block_n)
    unused = layout.bounds
    _kernel[(min(processors(q.device), items.shape[0]),)](
        descriptor(q, GROUP_ROWS),
        *kv_tiles,
        *kv_tiles if rest is None else (descriptor(_one_head(x), config.block_n) for x in rest),
        out,
        items,
        items.shape[0],
        counter,
        *(unused,) * 3 if lists is None else (lists.whole, lists.partial, lists.counts),
        unused if lists is None or lists.rest_bias is None else lists.rest_bias,
        scale * LOG2_E,
        tokens,
        layout.boxes,
        0 if lists is None else lists.whole.shape[1],
        0 if lists is None else lists.partial.shape[1],
        k.shape[2],
        heads // k.shape[2],
        *out.stride()[:3],
        HEAD_DIM=head_dim,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        GROUPS=config.groups,
        REGISTERS=config.registers,
        OVERLAP=config.overlap,
        REST=rest is not None,
        num_warps=4,
    )
    return out


def _one_head(means: Tensor) -> Tensor:
    """[B, KV, boxes, D] as [1, B * KV * boxes, 1, D]: rows below each other."""
    return means.contiguous().view(1, -1, 1, means.shape[-1])
