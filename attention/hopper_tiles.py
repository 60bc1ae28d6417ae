"""What Gluon kernels for Hopper share: steps of a group of four warps over tiles of keys, and descriptors.

Knows tensors [batch, tokens, heads, head_dim] and Gluon. Does not know any pattern.

A group has 64 queries. Tiles of keys and of values lie in two rings of ``STAGES`` tiles each; ``step`` counts
tiles over all that a program does. Barriers ``full`` and ``empty`` are those of the keys' ring, then those of
the values', then one of the queries.
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

GROUP_ROWS = 64
# Triton 3.9 has another name for it than 3.6.
copy_tile: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


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


PIN_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def product_layout(columns):
    """Layout of a group's product of so many columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def left_operand(weights, dtype: gl.constexpr, layout: gl.constexpr):
    """Weights as they are multiplied: the product has the layout."""
    return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def hide(scores, valid, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Scores of keys that do not count become -inf."""
    position = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    return gl.where((position < valid)[None, :], scores, float("-inf"))


@gluon.jit
def softmax(scores, row_max, scale_log2):
    """Weights, what earlier sums shrink by, and the new maximum."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_max[:, None])
    return weights, gl.exp2(row_max - new_max), new_max


@gluon.jit
def copy_keys_and_values(
    k_desc, v_desc, row, column, k_smem, v_smem, full, empty, step, STAGES: gl.constexpr
):
    """Of the copying warp: tile number ``step`` of both rings, once there is room."""
    stage = step % STAGES
    phase = ((step // STAGES) & 1) ^ 1
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(full.index(stage), k_desc.block_type.nbytes)
    copy_tile(k_desc, [row, column], full.index(stage), k_smem.index(stage))
    mbarrier.wait(empty.index(STAGES + stage), phase)
    mbarrier.expect(full.index(STAGES + stage), v_desc.block_type.nbytes)
    copy_tile(v_desc, [row, column], full.index(STAGES + stage), v_smem.index(stage))


@gluon.jit
def first_scores(q, no_scores, k_smem, full, empty, step, STAGES: gl.constexpr):
    """Scores of the first tile, which has nothing to overlap with."""
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    running = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[running])
    mbarrier.arrive(empty.index(stage), count=1)
    return scores


@gluon.jit
def first_softmax(
    scores, row_max, scale_log2, dtype: gl.constexpr, LAYOUT: gl.constexpr, OVERLAP: gl.constexpr
):
    """Weights of the first tile as ``scores_beside_sums`` takes them, and the maximum and sum of each row."""
    weights, _decay, row_max = softmax(scores, row_max, scale_log2)
    row_sum = gl.sum(weights, 1)
    if not OVERLAP:
        weights = left_operand(weights, dtype, LAYOUT)
    return weights, row_max, row_sum


@gluon.jit
def scores_beside_sums(
    q, no_scores, weights, acc, k_smem, v_smem, full, empty, step, LAYOUT: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Scores of tile number ``step + 1``; the product of the last weights with the values of tile number
    ``step``, added to ``acc``, which still runs; and its left operand.

    Weights are float32 with OVERLAP, else a left operand already.
    """
    stage = (step + 1) % STAGES
    mbarrier.wait(full.index(stage), ((step + 1) // STAGES) & 1)
    running = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    value_stage = step % STAGES
    mbarrier.wait(full.index(STAGES + value_stage), (step // STAGES) & 1)
    if OVERLAP:
        weights = left_operand(weights, v_smem.dtype, LAYOUT)
    sums = warpgroup_mma(weights, v_smem.index(value_stage), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[running])
    mbarrier.arrive(empty.index(stage), count=1)
    return scores, sums, weights


@gluon.jit
def softmax_beside_sums(
    scores, sums, p, row_max, row_sum, scale_log2, pin, empty, step, LAYOUT: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Weights of these scores, while the product that ``scores_beside_sums`` began ends; it becomes ``acc``.

    Returns weights, acc, and the maximum and the sum of each row.
    """
    weights, decay, row_max = softmax(scores, row_max, scale_log2)
    row_sum = row_sum * decay + gl.sum(weights, 1)
    if OVERLAP:
        # Written, never read: ptxas leaves a wait behind a store, and the store needs the softmax to be done.
        # Without it the wait for the product with the values comes before the softmax it should run beside.
        pin.store(row_sum)
        acc, _p, weights, row_sum = warpgroup_mma_wait(0, deps=[sums, p, weights, row_sum])
    else:
        weights = left_operand(weights, p.dtype, LAYOUT)
        acc, _p, weights, row_sum = warpgroup_mma_wait(0, deps=[sums, p, weights, row_sum])
    mbarrier.arrive(empty.index(STAGES + step % STAGES), count=1)
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, LAYOUT))[:, None]
    return weights, acc, row_max, row_sum


@gluon.jit
def last_sums(
    weights, acc, v_smem, full, empty, step, LAYOUT: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """The last weights times the values of the last tile, number ``step``, added to ``acc``."""
    stage = step % STAGES
    mbarrier.wait(full.index(STAGES + stage), (step // STAGES) & 1)
    if OVERLAP:
        weights = left_operand(weights, v_smem.dtype, LAYOUT)
    sums = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
    acc, _weights = warpgroup_mma_wait(0, deps=[sums, weights])
    mbarrier.arrive(empty.index(STAGES + stage), count=1)
    return acc


@gluon.jit
def store_rows(acc, row_sum, out, rows, end, stride_row, HEAD_DIM: gl.constexpr, layout: gl.constexpr):
    """Divide by the sums of the weights and store the rows before ``end`` of one head."""
    acc = acc * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    gl.store(
        out + rows.to(gl.int64)[:, None] * stride_row + columns[None, :],
        acc.to(out.dtype.element_ty),
        mask=(rows < end)[:, None],
    )


def processors(device: torch.device) -> int:
    """Multiprocessors of the GPU: as many programs run at a time."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
}


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of [B, N, H, D] for tiles of so many rows of one head."""
    batch, tokens, heads, head_dim = x.shape
    shape, strides, tile = [batch * tokens, heads * head_dim], [x.stride(1), 1], [rows, head_dim]
    swizzled = gl.NVMMASharedLayout.get_default_for(tile, _DTYPES[x.dtype])
    return TensorDescriptor(x, shape, strides, tile, swizzled)
