"""Selection on the GPU: means of boxes, and for each box of queries the tiles of keys that it walks.

Knows: scores and bounds of boxes. Does not know: attention. Nothing waits for the device.

A program of the listing kernel has one row of scores. The score of the last box that is kept is found bit by
bit; of boxes with just that score those with the lowest numbers are kept, so the choice is that of
``selection.selected_boxes``. Kept boxes that follow each other are one range of keys; a range is cut into
whole tiles, and one that is not whole where something is left.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.block_topk.layout import BoxLayout
from attention.block_topk.selection import kept_counts

_MEAN_ROWS = 32
_LOWEST = tl.constexpr(-(2**31))
_ALWAYS = tl.constexpr(2**31 - 1)  # above the integer of +inf


@dataclass(frozen=True, slots=True)
class KeyLists:
    """What each box of queries walks; row (entry * heads + head) * boxes + box is of one entry and head.

    Attributes:
        whole: int32 [rows, most]; first keys of whole tiles.
        partial: int32 [rows, most, 2]; first key and number of keys of tiles that are not whole.
        counts: int32 [rows, 2]; how many of each there are.
        rest_bias: float32 [rows, boxes]; log2 of the length of each box that is not kept, -inf for one that
            is. None: not asked for.
    """

    whole: Tensor
    partial: Tensor
    counts: Tensor
    rest_bias: Tensor | None


# Calls of jitted functions are what the interpreter spends its time with, and tl.sum is one; this is none.
_add = tl.standard._sum_combine


@triton.jit(do_not_specialize=["heads", "boxes", "stride_batch"])
def _mean_kernel(
    source, means, bounds, heads, boxes, stride_batch, stride_row, stride_head,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One box of one head. Heads of a box are neighbours: they read the same rows at about the same time."""
    program = tl.program_id(0)
    head = (program % heads).to(tl.int64)
    box = (program // heads) % boxes
    batch = (program // heads // boxes).to(tl.int64)
    begin = tl.load(bounds + box)
    end = tl.load(bounds + box + 1)
    source += batch * stride_batch + head * stride_head
    columns = tl.arange(0, COLUMNS)
    sums = tl.full([ROWS, COLUMNS], 0.0, dtype=tl.float32)
    for row in tl.range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & (columns < HEAD_DIM)[None, :]
        pointers = source + rows[:, None].to(tl.int64) * stride_row + columns[None, :]
        sums += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    mean = tl.reduce(sums, 0, _add) / (end - begin).to(tl.float32)
    means += ((batch * heads + head) * boxes + box) * HEAD_DIM
    tl.store(means + columns, mean, mask=columns < HEAD_DIM)


def box_means_triton(x: Tensor, layout: BoxLayout) -> Tensor:
    """Mean of each box of ordered x [batch, tokens, heads, head_dim].

    Returns:
        float32 [batch, heads, boxes, head_dim].
    """
    batch, _, heads, head_dim = x.shape
    means = torch.empty(batch, heads, layout.boxes, head_dim, dtype=torch.float32, device=x.device)
    _mean_kernel[(batch * heads * layout.boxes,)](
        x,
        means,
        layout.bounds,
        heads,
        layout.boxes,
        *x.stride()[:3],
        HEAD_DIM=head_dim,
        COLUMNS=triton.next_power_of_2(head_dim),
        ROWS=_MEAN_ROWS,
    )
    return means


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["boxes", "most_whole", "most_partial", "most_of_box"])
def _list_kernel(
    scores, always, kept, bounds, log2_lengths, whole, partial, counts, rest_bias, tally,
    boxes, most_whole, most_partial, most_of_box,
    BOXES: tl.constexpr, BLOCK_N: tl.constexpr, REST: tl.constexpr, TALLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    box = (row % boxes).to(tl.int32)
    j = tl.arange(0, BOXES)
    there = j < boxes
    need = tl.load(kept + box)

    # Integers in the order of the scores: those always kept are above all, padding below; NaN is -inf.
    score = tl.load(scores + row * boxes + j, mask=there, other=0.0)
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 is no less than 0.0
    score = tl.where(score == score, score, float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = tl.where(tl.load(always + box.to(tl.int64) * boxes + j, mask=there, other=0) != 0, _ALWAYS, rank)
    rank = tl.where(there, rank, _LOWEST)

    # The largest number that so many ranks reach.
    last = tl.where(tl.reduce((rank >= 0).to(tl.int32), 0, _add) >= need, 0, _LOWEST)
    for bit in tl.range(0, 31):
        higher = last + (1 << (30 - bit))
        last = tl.where(tl.reduce((rank >= higher).to(tl.int32), 0, _add) >= need, higher, last)
    above = rank > last
    equal = (rank == last) & there
    missing = need - tl.reduce(above.to(tl.int32), 0, _add)
    keeps = above | (equal & (tl.associative_scan(equal.to(tl.int32), 0, _add) <= missing))

    # A range begins where the last box before it that is not kept ends, and ends where the next one begins.
    first = tl.load(bounds)
    final = tl.load(bounds + boxes)
    begin = tl.load(bounds + j, mask=there, other=0)
    end = tl.load(bounds + j + 1, mask=there, other=0)
    range_begin = tl.associative_scan(tl.where(keeps, first, end), 0, _larger)
    range_end = tl.associative_scan(tl.where(keeps | (j >= boxes), final, begin), 0, _smaller, reverse=True)

    # A whole tile is listed by the box in which it ends, one that is not whole by the last box of its range.
    tiles_before = (begin - range_begin) // BLOCK_N
    tiles = tl.where(keeps, (end - range_begin) // BLOCK_N - tiles_before, 0)
    place = tl.associative_scan(tiles, 0, _add) - tiles
    for tile in tl.range(0, most_of_box):
        tl.store(
            whole + row * most_whole + place + tile,
            range_begin + (tiles_before + tile) * BLOCK_N,
            mask=tile < tiles,
        )
    left = tl.where(keeps & (end == range_end), (end - range_begin) % BLOCK_N, 0)
    is_partial = left > 0
    place = tl.associative_scan(is_partial.to(tl.int32), 0, _add) - 1
    tl.store(partial + (row * most_partial + place) * 2, end - left, mask=is_partial)
    tl.store(partial + (row * most_partial + place) * 2 + 1, left, mask=is_partial)
    tl.store(counts + row * 2, tl.reduce(tiles, 0, _add))
    tl.store(counts + row * 2 + 1, tl.reduce(is_partial.to(tl.int32), 0, _add))
    if REST:
        log2_length = tl.load(log2_lengths + j, mask=there, other=0.0)
        tl.store(rest_bias + row * boxes + j, tl.where(keeps, float("-inf"), log2_length), mask=there)
    if TALLY:
        keys = tl.reduce(tl.where(keeps, end - begin, 0), 0, _add).to(tl.int64)
        queries = tl.load(bounds + box + 1) - tl.load(bounds + box)
        tl.atomic_add(tally, keys * queries)


def key_lists(
    scores: Tensor,
    layout: BoxLayout,
    top_k: float,
    block_n: int,
    *,
    pooled_rest: bool,
    tally: Tensor | None,
) -> KeyLists:
    """Tiles of block_n keys for every box, by float32 scores [batch, heads, boxes, boxes].

    Args:
        tally: int64 [] on the device, to which the pairs within boxes that attend are added.
    """
    kept, most = kept_counts(layout, top_k)
    rows, device = scores.numel() // layout.boxes, scores.device
    most_keys = min(most * layout.longest, layout.tokens - layout.first)
    most_whole, most_partial = max(most_keys // block_n, 1), most
    whole = torch.empty(rows, most_whole, dtype=torch.int32, device=device)
    partial = torch.empty(rows, most_partial, 2, dtype=torch.int32, device=device)
    counts = torch.empty(rows, 2, dtype=torch.int32, device=device)
    rest_bias = torch.empty(rows, layout.boxes, device=device) if pooled_rest else None
    padded = max(32, triton.next_power_of_2(layout.boxes))
    _list_kernel[(rows,)](
        scores,
        layout.always,
        kept,
        layout.bounds,
        layout.log2_lengths,
        whole,
        partial,
        counts,
        counts if rest_bias is None else rest_bias,
        counts if tally is None else tally,
        layout.boxes,
        most_whole,
        most_partial,
        layout.longest // block_n + 1,
        BOXES=padded,
        BLOCK_N=block_n,
        REST=pooled_rest,
        TALLY=tally is not None,
        num_warps=1 if padded <= 256 else 4,
    )
    return KeyLists(whole, partial, counts, rest_bias)
