"""Norm, modulation and one product for q, k and v, a chunk of tokens after the other.

Knows: rows of hidden states and a linear layer's weights. Does not know: attention. The normed rows of a
chunk are read from the cache that they were written to, and all of them never exist at once.
"""

import torch
from torch import Tensor

from pipelines.fused.norms import norm_now

# Tiles of a GPU's products are at most 256 rows; so many of them leave no large remainder.
CHUNK_TOKENS = 8192


@torch.library.custom_op("reelwright::fused_norm_linear", mutates_args=())
def norm_linear(
    hidden: Tensor,
    modulation: Tensor,
    table: Tensor | None,
    shift: int,
    eps: float,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    """Hidden states [batch, tokens, channels], weight [out, channels] -> [batch, tokens, out].

    The rest as ``norms.norm``.
    """
    batch, tokens, _ = hidden.shape
    out = hidden.new_empty(batch, tokens, weight.shape[0])
    for entry in range(batch):
        for start in range(0, tokens, CHUNK_TOKENS):
            part = (slice(entry, entry + 1), slice(start, min(start + CHUNK_TOKENS, tokens)))
            each = modulation[part] if modulation.shape[1] > 1 else modulation[part[:1]]
            normed = norm_now(hidden[part], None, None, each, table, shift, eps)
            torch.addmm(bias, normed[0], weight.t(), out=out[entry, part[1]])
            del normed  # before the next one is made
    return out


@norm_linear.register_fake
def _(
    hidden: Tensor,
    modulation: Tensor,
    table: Tensor | None,
    shift: int,
    eps: float,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    return hidden.new_empty(hidden.shape[0], hidden.shape[1], weight.shape[0])
