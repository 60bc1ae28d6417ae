"""Root-mean-square normalisation in float32 or wider."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Normalisation of the last dimension with a weight for each channel, kept in float32."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return (self.weight.to(wide) * normalized(x.to(wide), self.eps)).to(x.dtype)


def normalized(x: Tensor, eps: float) -> Tensor:
    """x over the root mean square of its last dimension; computes in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
