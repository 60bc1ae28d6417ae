"""Norm, modulation and the products for q, k and v, a chunk of tokens after the other.

Knows: rows of hidden states and a linear layer's weights. Does not know: attention. The normed rows of a
chunk are read from the cache that they were written to, and all of them never exist at once. q, k and v lie
apart: what attention gives may be where q was, and v may be that of some heads, then of the others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipelines.fused.norms import norm_now

# A GPU's products are slower in smaller pieces (docs/notes.md), and larger ones need more room.
CHUNK_TOKENS = 12288


@torch.library.custom_op("reelwright::fused_norm_qkv", mutates_args=())
def norm_qkv(
    hidden: Tensor,
    modulation: Tensor,
    table: Tensor | None,
    shift: int,
    eps: float,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [batch, tokens, channels], weight [2 * channels + values, channels] of q, k and v.

    Returns q and k [batch, tokens, channels] and v [batch, tokens, values]. The rest as ``norms.norm``.
    """
    q, k, v = outs = _empty(hidden, weight)
    _norm_products(outs, hidden, modulation, table, shift, eps, weight, bias)
    return q, k, v


@torch.library.custom_op("reelwright::fused_norm_v_", mutates_args=("v",))
def norm_v_(
    v: Tensor,
    hidden: Tensor,
    modulation: Tensor,
    table: Tensor | None,
    shift: int,
    eps: float,
    weight: Tensor,
    bias: Tensor,
) -> None:
    """Writes the product with weight [values, channels] over the first values of v [batch, tokens, ...]."""
    out = v[..., : weight.shape[0]]
    _norm_products([out], hidden, modulation, table, shift, eps, weight, bias)


@norm_qkv.register_fake
def _(
    hidden: Tensor,
    modulation: Tensor,
    table: Tensor | None,
    shift: int,
    eps: float,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _empty(hidden, weight)
    return q, k, v


def _empty(hidden: Tensor, weight: Tensor) -> list[Tensor]:
    batch, tokens, channels = hidden.shape
    sizes = channels, channels, weight.shape[0] - 2 * channels
    return [hidden.new_empty(batch, tokens, size) for size in sizes]


def _norm_products(
    outs: Sequence[Tensor],
    hidden: Tensor,
    modulation: Tensor,
    table: Tensor | None,
    shift: int,
    eps: float,
    weight: Tensor,
    bias: Tensor,
) -> None:
    """Fills outs [batch, tokens, some of the rows of weight] with the products of the norm, in order."""
    sizes = [out.shape[2] for out in outs]
    products = list(zip(outs, weight.split(sizes), bias.split(sizes), strict=True))
    batch, tokens, _ = hidden.shape
    for entry in range(batch):
        for start in range(0, tokens, CHUNK_TOKENS):
            chunk = slice(start, min(start + CHUNK_TOKENS, tokens))
            here = (slice(entry, entry + 1), chunk)
            each = modulation[here] if modulation.shape[1] > 1 else modulation[here[:1]]
            normed = norm_now(hidden[here], None, None, each, table, shift, eps)
            for out, rows, offset in products:
                torch.addmm(offset, normed[0], rows.t(), out=out[entry, chunk])
            del normed  # before the next one is made
