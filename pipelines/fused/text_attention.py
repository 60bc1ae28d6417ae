"""Attention of tokens to text with the products before and behind it, a chunk of tokens after the other.

Knows: rows of tokens, two linear layers' weights, keys and values. Does not know: what computes attention;
that is Diffusers' choice for the process. Every token meets the text by itself, so that what it becomes may
be where it was, and nothing that a chunk needs exists for all tokens at once.
"""

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor

from pipelines.fused import projection
from pipelines.fused.rotary import rms_norm_


@torch.library.custom_op("reelwright::fused_attend_text_", mutates_args=("x",))
def attend_text_(
    x: Tensor,
    q_weight: Tensor,
    q_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    keys: list[Tensor],
    values: list[Tensor],
    out_weight: Tensor,
    out_bias: Tensor,
    heads: int,
) -> None:
    """x [batch, tokens, channels] becomes what the layer gives for it.

    Keys and values [batch, entries, channels]; each pair is attended to by itself, and the results added.
    """
    for entry in range(x.shape[0]):
        for rows in x[entry].split(projection.CHUNK_TOKENS):
            q = torch.addmm(q_bias, rows, q_weight.t())[None]
            rms_norm_(q, norm_weight, eps)
            attended = [
                _attend(q, k[entry, None], v[entry, None], heads) for k, v in zip(keys, values, strict=True)
            ]
            torch.addmm(out_bias, sum(attended[1:], attended[0])[0], out_weight.t(), out=rows)
            del q, attended  # before the next ones are made


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """[1, tokens, channels] -> the same."""
    q, k, v = (x.unflatten(2, (heads, -1)) for x in (q, k, v))
    out: Tensor = dispatch_attention_fn(q, k, v)
    return out.flatten(2, 3).type_as(q)
