"""What Triton kernels over tiles of rows share: loading a tile, a step of the online softmax, descriptors.

Knows tensors [batch, tokens, heads, head_dim]. Does not know any pattern.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.choice import is_data_center_gpu
from attention.triton_dot import dot

LOG2_E = 1.4426950408889634
# Of sinks: kernels compute powers of two, of logits times LOG2_E, which has to stay finite. Beside a larger
# one nothing else has any weight, and one below the negative has none.
LARGEST_SINK = tl.constexpr(2.0**127)


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Shape of the work of one program: query rows, key rows per loop step, warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def load_tile(
    source, batch_row, row, rows_end, column, stride_row, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLUMNS] of one head, zero beyond the tensor; by descriptor or by pointers."""
    if TMA:
        tile = source.load([batch_row + row, column])
    else:
        rows = row + tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)
        mask = (rows < rows_end)[:, None] & (columns < HEAD_DIM)[None, :]
        # int64 before the product: 2^31 elements is 524,288 tokens of 32 heads of 128.
        tile = tl.load(
            source + rows[:, None].to(tl.int64) * stride_row + columns[None, :], mask=mask, other=0.0
        )
    return tile


@triton.jit
def softmax_step(
    q, key, value, acc, row_max, row_sum, scale_log2, bias, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BIASED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax (base 2, float32) over a tile of keys.

    BIASED: ``bias`` [BLOCK_N], in units of log2, is added to the scaled scores; -inf hides a key. A row must
    have seen a key before a tile hides all of its own.
    """
    scores = dot(q, key.T, tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32), INTERPRETED)
    if BIASED:
        scores = scores * scale_log2 + bias[None, :]
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.math.exp2(scores - new_max[:, None])
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.math.exp2(scores * scale_log2 - new_max[:, None])
    decay = tl.math.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = dot(weights.to(value.dtype), value, acc, INTERPRETED)
    return acc, new_max, row_sum


def large_tiles(device: torch.device) -> bool:
    """Whether Hopper's tiles and bulk copies may be used; the interpreter plays a Hopper."""
    return device.type == "cpu" or is_data_center_gpu(device)


def fits_descriptor(x: Tensor) -> bool:
    """Whether [B, N, H, D] can be seen as one matrix [B * N, H * D] that a descriptor may describe."""
    batch, tokens, _, head_dim = x.shape
    row_bytes = x.stride(1) * x.element_size()
    one_matrix = x.stride(2) == head_dim and (batch == 1 or x.stride(0) == tokens * x.stride(1))
    return one_matrix and row_bytes % 16 == 0 and x.data_ptr() % 16 == 0 and batch * tokens < 2**31


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of [B, N, H, D] for tiles of so many rows of one head."""
    batch, tokens, heads, head_dim = x.shape
    return TensorDescriptor(x, [batch * tokens, heads * head_dim], [x.stride(1), 1], [rows, head_dim])
