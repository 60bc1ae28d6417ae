"""Norm, modulation and the products for q, k and v, a chunk of tokens after the other.

Knows: rows of hidden states and a linear layer's weights. Does not know: attention. The normed rows of a
chunk are read from the cache that they were written to, and all of them never exist at once. q lies apart
from k and v, which are needed no longer once attention has run; what it gives may be where q was.
"""

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
) -> tuple[Tensor, Tensor]:
    """Hidden states [batch, tokens, channels], weight [3 * channels, channels] of q, k and v.

    Returns q [batch, tokens, channels], and k beside v [batch, tokens, 2 * channels]. The rest as
    ``norms.norm``.
    """
    batch, tokens, channels = hidden.shape
    parts = channels, weight.shape[0] - channels
    products = [
        (out, each.t(), offset)
        for out, each, offset in zip(
            (hidden.new_empty(batch, tokens, size) for size in parts),
            weight.split(parts),
            bias.split(parts),
            strict=True,
        )
    ]
    for entry in range(batch):
        for start in range(0, tokens, CHUNK_TOKENS):
            chunk = slice(start, min(start + CHUNK_TOKENS, tokens))
            here = (slice(entry, entry + 1), chunk)
            each = modulation[here] if modulation.shape[1] > 1 else modulation[here[:1]]
            normed = norm_now(hidden[here], None, None, each, table, shift, eps)
            for out, columns, offset in products:
                torch.addmm(offset, normed[0], columns, out=out[entry, chunk])
            del normed  # before the next one is made
    (q, _, _), (kv, _, _) = products
    return q, kv


@norm_qkv.register_fake
def _(
    hidden: Tensor,
    modulation: Tensor,
    table: Tensor | None,
    shift: int,
    eps: float,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor]:
    batch, tokens, channels = hidden.shape
    return hidden.new_empty(hidden.shape), hidden.new_empty(batch, tokens, weight.shape[0] - channels)
