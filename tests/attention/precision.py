"""What the error budgets of all operators share."""

from torch import Tensor


def sequential_product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product [..., M, K] x [..., K, N] that adds up one term after another, as a kernel's does.

    Libraries add up in blocks, which is more exact: in float32 by a factor of two at 256 terms.
    """
    out = a.new_zeros(*a.shape[:-1], b.shape[-1])
    for i in range(a.shape[-1]):
        out = out.addcmul(a[..., i : i + 1], b[..., i : i + 1, :])
    return out
