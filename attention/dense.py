"""Dense self-attention: PyTorch's, or on Hopper our own kernel over one range of keys, where that is faster.

Knows which of the two runs. Does not know who asks, or why a call is dense.
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention.hopper_limits import hopper_takes
from attention.layout import anchor_local_layout
from attention.pattern import AnchorLocalPattern

SDPA = "sdpa"
GLUON = "gluon"
# On an H200 ours was faster from 32,760 tokens on, PyTorch's at 4,096; nothing was timed in between.
FEWEST_TOKENS = 32_000


def dense_implementation(q: Tensor, k: Tensor) -> str:
    """What ``dense_attention`` runs for such q, k [batch, tokens, heads, head_dim]: ``sdpa`` or ``gluon``."""
    is_long = q.shape[1] == k.shape[1] >= FEWEST_TOKENS
    return GLUON if is_long and hopper_takes(q.device, q.dtype, q.shape[3]) else SDPA


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """q, k, v [batch, tokens, heads, head_dim]; every query sees every key. Returns the shape of q, dense.

    Or writes it to ``out``, which may be q.
    """
    if dense_implementation(q, k) == GLUON:
        from attention.anchor_local.hopper import anchor_local_hopper

        tokens = q.shape[1]
        everything = anchor_local_layout(AnchorLocalPattern(tokens, 1), tokens, q.device)
        return anchor_local_hopper(q, k, v, everything, scale, out=out)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    found = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    found = found.transpose(1, 2)
    return found.contiguous() if out is None else out.copy_(found)
