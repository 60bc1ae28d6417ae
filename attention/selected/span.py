"""The tokens of one call: where each stands in its sequence. Knows positions, not what is computed there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Span:
    """New tokens of several sequences, padded to one length.

    Attributes:
        starts: tokens that each sequence had before.
        counts: new tokens of each sequence, in front of its padding.
        positions: int64 [batch, length], counted from the first token of the sequence; -1 is padding.
        first_positions: int64 [batch], ``starts`` on the device.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    positions: Tensor
    first_positions: Tensor

    @classmethod
    def following(
        cls, starts: Sequence[int], counts: Sequence[int], length: int, device: torch.device | str
    ) -> "Span":
        """The span behind these many tokens of each sequence.

        Raises:
            ValueError: not one count for each sequence, or a count that is negative or above ``length``.
        """
        if len(counts) != len(starts) or not all(0 <= count <= length for count in counts):
            raise ValueError(
                f"counts must be {len(starts)} numbers of tokens, 0 .. {length}, got {list(counts)}"
            )
        first, limits = torch.tensor([starts, counts], dtype=torch.int64).to(device)
        steps = torch.arange(length, device=device)
        positions = (first[:, None] + steps).where(steps < limits[:, None], -1)
        return cls(tuple(starts), tuple(counts), positions, first)

    @property
    def length(self) -> int:
        """Tokens of each sequence, padding included."""
        return self.positions.shape[1]

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that each sequence has with these."""
        return tuple(start + count for start, count in zip(self.starts, self.counts, strict=True))

    def closed_windows(self, ratio: int) -> tuple[int, ...]:
        """Windows of ``ratio`` tokens that end with one of these, of each sequence."""
        return tuple(end // ratio - start // ratio for start, end in zip(self.starts, self.ends, strict=True))
