"""Rotary embedding of the last channels in neighbouring pairs, with the YaRN change of frequencies."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Yarn:
    """Frequencies slowed down by ``factor`` where they turn rarely within the original length.

    Those that turn more than ``beta_fast`` times in it stay, those below ``beta_slow`` are slowed down, those
    between are mixed.
    """

    original_length: int
    factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotation of the last ``dims`` channels.

    Raises:
        ValueError: dims is odd or negative, or theta is not above 1.
    """

    dims: int
    theta: float = 10_000.0
    yarn: Yarn | None = None

    def __post_init__(self) -> None:
        if self.dims < 0 or self.dims % 2:
            raise ValueError(f"rotary dims must be even and at least 0, got {self.dims}")
        if not self.theta > 1:
            raise ValueError(f"rotary theta must be above 1, got {self.theta}")

    def turns(self, positions: Tensor) -> "Turns":
        """Rotation of tokens at these positions, of any shape. Angles are computed in float64."""
        angles = positions[..., None].double() * _frequencies(self, positions.device)
        return Turns(angles.cos(), angles.sin())


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Cosines and sines of rotations: float64, shape of the positions and one more axis of dims / 2."""

    cos: Tensor
    sin: Tensor

    @property
    def inverse(self) -> "Turns":
        """The way back."""
        return Turns(self.cos, -self.sin)

    def of_heads(self) -> "Turns":
        """The same for all heads of a token: an axis for them behind that of the tokens."""
        return Turns(self.cos.unsqueeze(-2), self.sin.unsqueeze(-2))

    def rotate(self, x: Tensor) -> Tensor:
        """Turn the channel pairs (0, 1), (2, 3), .. of the last dims of x; computes in float32 or wider."""
        dims = 2 * self.cos.shape[-1]
        if dims == 0:
            return x
        kept, turned = x.split([x.shape[-1] - dims, dims], dim=-1)
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = self.cos.to(wide), self.sin.to(wide)
        even, odd = turned.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
        pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
        return torch.cat([kept, pairs.flatten(-2).to(x.dtype)], dim=-1)


@lru_cache(maxsize=32)
def _frequencies(rotary: Rotary, device: torch.device) -> Tensor:
    """float64 [dims / 2], radians for each token."""
    half = rotary.dims // 2
    frequencies = [rotary.theta ** (-index / half) for index in range(half)]
    if rotary.yarn is not None:
        yarn = rotary.yarn
        low = max(math.floor(_turning(rotary, yarn, yarn.beta_fast)), 0)
        high = min(math.ceil(_turning(rotary, yarn, yarn.beta_slow)), rotary.dims - 1)
        for index, frequency in enumerate(frequencies):
            slowed = min(max((index - low) / max(high - low, 1e-3), 0.0), 1.0)
            frequencies[index] = frequency * (slowed / yarn.factor + 1 - slowed)
    return torch.tensor(frequencies, dtype=torch.float64, device=device)


def _turning(rotary: Rotary, yarn: Yarn, times: float) -> float:
    """Index of the frequency that turns so many times within the original length."""
    turns_at_1 = yarn.original_length / (2 * math.pi)
    return rotary.dims * math.log(turns_at_1 / times) / (2 * math.log(rotary.theta))
