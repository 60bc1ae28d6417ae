"""Candidates for the anchor_local kernel, behind one table and one launcher.

    python -m benchmarks.attention --candidates

All walk the same two ranges of keys as the shipped kernel. They differ in constants of the kernel:

* ORDER of the work of a loop step. ``plain``: scores, softmax, values, as shipped. ``ahead``: the scores of
  the next tile, then softmax and values of this one. ``behind``: scores of this tile, values of the one
  before, softmax of this one; so Triton leaves the product with the values running while the softmax is
  computed, which the other orders get by luck of the compiler at most. Its first step has no weights yet and
  multiplies zeros; ``peeled`` computes the first tile's weights before the loop, for one buffer more.
* GATHERED: the rests of both ranges, which fill no tile, are gathered through pointers and share tiles.
* PERSISTENT: one program a multiprocessor takes tile after tile, so that no tile waits for a program's start.
* HEADS_AHEAD: anchor tiles of a head run so many heads before its segments, not before everything; 0 is off.

Knows Triton and layouts. Does not know which candidate is best.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.anchor_local.tile_table import tile_table
from attention.anchor_local.triton_impl import _LENGTHS, _STRIDES, _softmax_step, anchor_local_triton
from attention.layout import AnchorLocalLayout
from attention.triton_dot import dot
from attention.triton_tiles import LOG2_E, TileConfig, descriptor

Order = Literal["plain", "ahead", "behind", "peeled"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel variant with its tiles. ``shipped`` is the kernel in attention/, with other tiles."""

    config: TileConfig
    shipped: bool = False
    gathered: bool = False
    persistent: bool = False
    order: Order = "plain"
    heads_ahead: int = 0


_LARGE = TileConfig(128, 128, 8, 3)
_FLAT = TileConfig(128, 64, 8, 5)
_SMALL = TileConfig(64, 128, 4, 2)
CANDIDATES: dict[int, dict[str, Candidate]] = {
    128: {
        "shipped": Candidate(_LARGE, shipped=True),
        "plain": Candidate(_LARGE),
        "plain, gathered": Candidate(_LARGE, gathered=True),
        "plain, gathered, 2 heads ahead": Candidate(_LARGE, gathered=True, heads_ahead=2),
        "behind": Candidate(_LARGE, order="behind"),
        "behind, 2 heads ahead": Candidate(_LARGE, order="behind", heads_ahead=2),
        "behind, gathered": Candidate(_LARGE, order="behind", gathered=True),
        "behind, persistent": Candidate(_LARGE, order="behind", persistent=True),
        "behind, 128x64": Candidate(_FLAT, order="behind"),
        "peeled, 128x64, gathered": Candidate(_FLAT, order="peeled", gathered=True),
        "ahead, 128x64, gathered": Candidate(_FLAT, order="ahead", gathered=True),
    },
    64: {
        "shipped": Candidate(_SMALL, shipped=True),
        "plain": Candidate(_SMALL),
        "behind": Candidate(_SMALL, order="behind"),
        "behind, 3 stages": Candidate(replace(_SMALL, num_stages=3), order="behind"),
        "behind, 128x128": Candidate(TileConfig(128, 128, 8, 2), order="behind"),
        "behind, 128x128, 3 stages": Candidate(TileConfig(128, 128, 8, 3), order="behind"),
        "behind, 64x64": Candidate(TileConfig(64, 64, 4, 3), order="behind"),
        "peeled, 64x128": Candidate(_SMALL, order="peeled"),
    },
}
"""By head_dim; shipped comes first."""


@triton.jit
def _weights(scores, row_max, row_sum, scale_log2):
    """The online softmax of whole tiles: weights, what earlier sums shrink by, new maximum and sum."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    weights = tl.math.exp2(scores * scale_log2 - new_max[:, None])
    decay = tl.math.exp2(row_max - new_max)
    return weights, decay, new_max, row_sum * decay + tl.sum(weights, 1)


@triton.jit
def _attend(
    q_source, k_source, v_source, k_pointer, v_pointer, out, tiles, tile, batch_head, is_anchor, scale_log2,
    queries, tokens, anchors, heads, group, kv_stride_batch, kv_stride_row, kv_stride_head,
    out_stride_batch, out_stride_row, out_stride_head,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATHERED: tl.constexpr,
    ORDER: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One tile of queries, from its row of the table to the stored output."""
    batch = batch_head // heads
    head = batch_head % heads
    kv_head = head // group
    begin = tl.load(tiles + tile * 4)
    end = tl.load(tiles + tile * 4 + 1)
    key_begin = tl.load(tiles + tile * 4 + 2)
    key_end = tl.load(tiles + tile * 4 + 3)
    first_count = tl.where(is_anchor, tokens, anchors)
    first_rows = first_count // BLOCK_N * BLOCK_N
    second_rows = (key_end - key_begin) // BLOCK_N * BLOCK_N
    first_rest = first_count - first_rows
    rests = first_rest + key_end - key_begin - second_rows
    # Rows of the key matrix are counted on from the batch entry's first; behind the first range they jump.
    kv_row = batch * tokens
    jump = kv_row + key_begin - first_rows
    column = kv_head * HEAD_DIM

    q = q_source.load([batch * queries + begin, head * HEAD_DIM])
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    whole_rows = first_rows + second_rows
    if ORDER == "peeled":
        # The first tile's weights before the loop, which costs a buffer for its keys.
        start = tl.where(first_rows > 0, kv_row, jump)
        scores = dot(
            q, k_source.load([start, column]).T, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32), INTERPRETED
        )
        weights, decay, first_max, first_sum = _weights(scores, row_max, row_sum, scale_log2)
        row_max = tl.where(whole_rows > 0, first_max, row_max)
        row_sum = tl.where(whole_rows > 0, first_sum, row_sum)
        for start in tl.range(BLOCK_N, whole_rows, BLOCK_N):
            key = k_source.load([start + tl.where(start < first_rows, kv_row, jump), column])
            last = start - BLOCK_N
            value = v_source.load([last + tl.where(last < first_rows, kv_row, jump), column])
            scores = dot(q, key.T, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32), INTERPRETED)
            acc = dot(weights.to(value.dtype), value, acc * decay[:, None], INTERPRETED)
            weights, decay, row_max, row_sum = _weights(scores, row_max, row_sum, scale_log2)
        if whole_rows > 0:
            last = whole_rows - BLOCK_N
            value = v_source.load([last + tl.where(last < first_rows, kv_row, jump), column])
            acc = dot(weights.to(value.dtype), value, acc * decay[:, None], INTERPRETED)
    elif ORDER == "behind":
        # The first step has no weights yet: zeros, times the first tile's values.
        weights = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        decay = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
        for start in tl.range(0, whole_rows, BLOCK_N):
            key = k_source.load([start + tl.where(start < first_rows, kv_row, jump), column])
            last = tl.maximum(start - BLOCK_N, 0)
            value = v_source.load([last + tl.where(last < first_rows, kv_row, jump), column])
            scores = dot(q, key.T, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32), INTERPRETED)
            acc = dot(weights.to(value.dtype), value, acc * decay[:, None], INTERPRETED)
            weights, decay, row_max, row_sum = _weights(scores, row_max, row_sum, scale_log2)
        if whole_rows > 0:
            last = whole_rows - BLOCK_N
            value = v_source.load([last + tl.where(last < first_rows, kv_row, jump), column])
            acc = dot(weights.to(value.dtype), value, acc * decay[:, None], INTERPRETED)
    elif ORDER == "ahead":
        # Where there is no whole tile this one's scores go unused.
        scores = dot(
            q,
            k_source.load([tl.where(first_rows > 0, kv_row, jump), column]).T,
            tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32),
            INTERPRETED,
        )
        for start in tl.range(0, whole_rows, BLOCK_N):
            # The last step has no next tile and reads the last one again.
            later = tl.minimum(start + BLOCK_N, whole_rows - BLOCK_N)
            key = k_source.load([later + tl.where(later < first_rows, kv_row, jump), column])
            value = v_source.load([start + tl.where(start < first_rows, kv_row, jump), column])
            next_scores = dot(q, key.T, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32), INTERPRETED)
            weights, decay, row_max, row_sum = _weights(scores, row_max, row_sum, scale_log2)
            acc = dot(weights.to(value.dtype), value, acc * decay[:, None], INTERPRETED)
            scores = next_scores
    else:
        for start in tl.range(0, whole_rows, BLOCK_N):
            row = start + tl.where(start < first_rows, kv_row, jump)
            key = k_source.load([row, column])
            value = v_source.load([row, column])
            acc, row_max, row_sum = _softmax_step(
                q, key, value, acc, row_max, row_sum, scale_log2, BLOCK_N, BLOCK_M, BLOCK_N, False,
                INTERPRETED,
            )  # fmt: skip
    if GATHERED:
        position = tl.arange(0, BLOCK_N)
        columns = tl.arange(0, HEAD_DIM)
        base = batch.to(tl.int64) * kv_stride_batch + kv_head.to(tl.int64) * kv_stride_head
        for start in tl.range(0, rests, BLOCK_N, num_stages=1):
            left = rests - start
            rest = start + position
            row = tl.where(rest < first_rest, first_rows + rest, key_begin + second_rows + rest - first_rest)
            offsets = base + row.to(tl.int64)[:, None] * kv_stride_row + columns[None, :]
            mask = (position < left)[:, None]
            key = tl.load(k_pointer + offsets, mask=mask, other=0.0)
            value = tl.load(v_pointer + offsets, mask=mask, other=0.0)
            acc, row_max, row_sum = _softmax_step(
                q, key, value, acc, row_max, row_sum, scale_log2, left, BLOCK_M, BLOCK_N, True, INTERPRETED
            )
    else:
        if first_rest > 0:
            key = k_source.load([kv_row + first_rows, column])
            value = v_source.load([kv_row + first_rows, column])
            acc, row_max, row_sum = _softmax_step(
                q, key, value, acc, row_max, row_sum, scale_log2, first_rest, BLOCK_M, BLOCK_N, True,
                INTERPRETED,
            )  # fmt: skip
        if rests > first_rest:
            key = k_source.load([jump + whole_rows, column])
            value = v_source.load([jump + whole_rows, column])
            acc, row_max, row_sum = _softmax_step(
                q, key, value, acc, row_max, row_sum, scale_log2, rests - first_rest, BLOCK_M, BLOCK_N, True,
                INTERPRETED,
            )  # fmt: skip

    acc = acc / row_sum[:, None]
    rows = begin + tl.arange(0, BLOCK_M)
    out += batch.to(tl.int64) * out_stride_batch + head.to(tl.int64) * out_stride_head
    tl.store(
        out + rows[:, None].to(tl.int64) * out_stride_row + tl.arange(0, HEAD_DIM)[None, :],
        acc.to(out.dtype.element_ty),
        mask=(rows < end)[:, None],
    )


@triton.jit
def _place(program, anchor_tiles, segment_tiles, batch_heads, HEADS_AHEAD: tl.constexpr):
    """(batch and head, tile, whether it is one of anchors) of a place in the order."""
    if HEADS_AHEAD:
        # First the anchor tiles of so many heads, then rounds: anchor tiles of the head that lies so many
        # ahead, and the segments of this one. The last rounds have segments only.
        lead = tl.minimum(HEADS_AHEAD, batch_heads)
        after = program - lead * anchor_tiles
        full = (batch_heads - lead) * (anchor_tiles + segment_tiles)
        size = tl.where(after < full, anchor_tiles + segment_tiles, segment_tiles)
        inside = tl.where(after < full, after, after - full)
        within = inside % size
        behind = inside // size + tl.where(after < full, 0, batch_heads - lead)
        is_anchor = (after < 0) | ((after < full) & (within < anchor_tiles))
        anchor_head = tl.where(after < 0, program // anchor_tiles, behind + lead)
        anchor_tile = tl.where(after < 0, program % anchor_tiles, within)
        segment_tile = tl.where(after < full, within, within + anchor_tiles)
        batch_head = tl.where(is_anchor, anchor_head, behind)
        tile = tl.where(is_anchor, anchor_tile, segment_tile)
    else:
        anchor_programs = anchor_tiles * batch_heads
        is_anchor = program < anchor_programs
        after = program - anchor_programs
        # Without anchor tiles or segments one of the two is not looked at, but must not divide by zero.
        batch_head = tl.where(
            is_anchor, program // tl.maximum(anchor_tiles, 1), after // tl.maximum(segment_tiles, 1)
        )
        tile = tl.where(
            is_anchor,
            program % tl.maximum(anchor_tiles, 1),
            anchor_tiles + after % tl.maximum(segment_tiles, 1),
        )
    return batch_head, tile, is_anchor


@triton.jit(do_not_specialize=[*_LENGTHS, *_STRIDES, "kv_stride_batch", "heads", "group"])
def _candidate_kernel(
    q_source, k_source, v_source, k_pointer, v_pointer, out, tiles, scale_log2,
    queries, tokens, anchors, anchor_tiles, segment_tiles, heads, group,
    kv_stride_batch, kv_stride_row, kv_stride_head, out_stride_batch, out_stride_row, out_stride_head,
    batch_heads,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GATHERED: tl.constexpr,
    PERSISTENT: tl.constexpr, ORDER: tl.constexpr, HEADS_AHEAD: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        for program in tl.range(
            tl.program_id(0), (anchor_tiles + segment_tiles) * batch_heads, tl.num_programs(0)
        ):
            batch_head, tile, is_anchor = _place(
                program, anchor_tiles, segment_tiles, batch_heads, HEADS_AHEAD
            )
            _attend(
                q_source, k_source, v_source, k_pointer, v_pointer, out, tiles, tile, batch_head, is_anchor,
                scale_log2, queries, tokens, anchors, heads, group, kv_stride_batch, kv_stride_row,
                kv_stride_head, out_stride_batch, out_stride_row, out_stride_head, HEAD_DIM, BLOCK_M, BLOCK_N,
                GATHERED, ORDER, INTERPRETED,
            )  # fmt: skip
    else:
        batch_head, tile, is_anchor = _place(
            tl.program_id(0), anchor_tiles, segment_tiles, batch_heads, HEADS_AHEAD
        )
        _attend(
            q_source, k_source, v_source, k_pointer, v_pointer, out, tiles, tile, batch_head, is_anchor,
            scale_log2, queries, tokens, anchors, heads, group, kv_stride_batch, kv_stride_row,
            kv_stride_head, out_stride_batch, out_stride_row, out_stride_head, HEAD_DIM, BLOCK_M, BLOCK_N,
            GATHERED, ORDER, INTERPRETED,
        )  # fmt: skip


def constants(candidate: Candidate, head_dim: int, interpreted: bool) -> dict[str, int | bool | str]:
    """What a candidate is compiled with."""
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_M": candidate.config.block_m,
        "BLOCK_N": candidate.config.block_n,
        "GATHERED": candidate.gathered,
        "PERSISTENT": candidate.persistent,
        "ORDER": candidate.order,
        "HEADS_AHEAD": candidate.heads_ahead,
        "INTERPRETED": interpreted,
    }


def run(
    candidate: Candidate,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnchorLocalLayout,
    scale: float,
    out: Tensor | None = None,
    programs: int | None = None,
) -> Tensor:
    """As ``anchor_local_triton``, for contiguous q, k, v whose head_dim is a power of two.

    ``programs`` is how many a persistent candidate starts; by default one a multiprocessor.
    """
    if candidate.shipped:
        return anchor_local_triton(q, k, v, layout, scale, candidate.config, out)
    if not all(x.is_contiguous() for x in (q, k, v)):
        raise ValueError("candidates take contiguous q, k and v")
    batch, queries, heads, head_dim = q.shape
    config = candidate.config
    out = torch.empty_like(q) if out is None else out
    tiles, anchor_tiles = tile_table(layout, config.block_m, q.device)
    total = tiles.shape[0] * batch * heads
    if candidate.persistent:
        total = min(total, programs or _multiprocessors(q.device))
    _candidate_kernel[(total,)](
        descriptor(q, config.block_m),
        descriptor(k, config.block_n),
        descriptor(v, config.block_n),
        k,
        v,
        out,
        tiles,
        scale * LOG2_E,
        queries,
        k.shape[1],
        layout.anchors,
        anchor_tiles,
        tiles.shape[0] - anchor_tiles,
        heads,
        heads // k.shape[2],
        *k.stride()[:3],
        *out.stride()[:3],
        batch * heads,
        **constants(candidate, head_dim, interpreted=q.device.type == "cpu"),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
