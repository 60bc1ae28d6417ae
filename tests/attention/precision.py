"""What the error budgets of all operators share."""

import torch
from torch import Tensor


def sequential_product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product [..., M, K] x [..., K, N] that adds up one term after another, as a kernel's does.

    The sum is in float32 or wider, and rounded once. Libraries add up in blocks, which is more exact: in
    float32 by a factor of two at 256 terms.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    out = a.new_zeros(*a.shape[:-1], b.shape[-1], dtype=wide)
    for i in range(a.shape[-1]):
        out = out.addcmul(a[..., i : i + 1].to(wide), b[..., i : i + 1, :].to(wide))
    return out.to(a.dtype)
