"""What anchor_local is measured against: PyTorch's dense attention, and FlexAttention with the same mask.

Knows PyTorch's attentions. Does not know our kernels.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from attention.layout import AnchorLocalLayout
from benchmarks.attention_cases import Inputs, Shape

DENSE_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
FLEX_ORDERS = ("raster", "permuted")

Call = Callable[[], Tensor]


def dense_call(x: Inputs, backend: str) -> Call:
    """Dense attention by one of DENSE_BACKENDS; [1, heads, tokens, head_dim]."""
    q, k, v = (part.transpose(1, 2) for part in (x.q, x.k, x.v))

    def call() -> Tensor:
        with sdpa_kernel(DENSE_BACKENDS[backend]):
            return scaled_dot_product_attention(q, k, v)

    return call


def flex_call(shape: Shape, x: Inputs, order: str, *, compiled: bool = True) -> Call:
    """FlexAttention over tokens in raster order, or permuted as our kernel has them.

    Returns [1, tokens, heads, head_dim] in the order of x. Every call moves nothing: in raster order the
    tokens are put there once, here.
    """
    in_raster = order == "raster"
    tensors = [x.q, x.k, x.v]
    if in_raster:
        tensors = [part[:, x.layout.query_inverse].contiguous() for part in tensors]
    q, k, v = (part.transpose(1, 2) for part in tensors)
    sees = _raster_mask(shape) if in_raster else _permuted_mask(x.layout)
    # Compiled, the mask is looked at tile by tile; eager, all pairs exist at once.
    mask = create_block_mask(
        sees, None, None, shape.tokens, shape.tokens, device=str(q.device), _compile=compiled
    )
    attention = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention

    def call() -> Tensor:
        out: Tensor = attention(q, k, v, block_mask=mask, scale=shape.scale).transpose(1, 2)
        return out

    return call


def in_order(out: Tensor, x: Inputs, order: str) -> Tensor:
    """A result of ``flex_call`` in the order of x."""
    return out[:, x.layout.query_order] if order == "raster" else out


Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _raster_mask(shape: Shape) -> Sees:
    pattern = shape.pattern

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        anchor = (q % pattern.anchor_stride == 0) | (k % pattern.anchor_stride == 0)
        return anchor | (q // pattern.block_size == k // pattern.block_size)

    return sees


def _permuted_mask(layout: AnchorLocalLayout) -> Sees:
    segment = torch.full([layout.tokens], -1, dtype=torch.int32)
    for number, (begin, end) in enumerate(layout.runs[:, 2:].tolist()):
        segment[begin:end] = number
    segment = segment.to(layout.key_order.device)

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q < layout.anchors) | (k < layout.anchors) | (segment[q] == segment[k])

    return sees
