"""How a module's output is put into another token order. Each function gives back the shape it was given, but
for the number of tokens, if the new order has only some of them.

Knows shapes. Does not know which module of which model has them: that is in the table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention.backends import TokenOrder

# A module's output, the positions in it that the tokens of the new order have, and how many the clip has.
Mover = Callable[[Any, Tensor, int], Any]


@dataclass(frozen=True, slots=True)
class Move:
    """The output of ``module`` is put into the backend's order, or ``back`` into the raster's."""

    module: str
    mover: Mover
    back: bool = False

    def apply(self, output: Any, order: TokenOrder) -> Any:
        """The output in its other order."""
        if not self.back:
            return self.mover(output, order.order, order.tokens)
        rows = output if order.gather is None else order.gather(output)
        return self.mover(rows, order.inverse, order.tokens)


def along(dim: int) -> Mover:
    """Tokens on this dimension of a tensor, or of each of several."""

    def move(
        output: Tensor | tuple[Tensor, ...], positions: Tensor, tokens: int
    ) -> Tensor | tuple[Tensor, ...]:
        if isinstance(output, Tensor):
            return output.index_select(dim, positions)
        return tuple(table.index_select(dim, positions) for table in output)

    return move


def voxels(output: Tensor, positions: Tensor, tokens: int) -> Tensor:
    """[batch, channels, time, height, width] to [batch, channels, tokens], which flattens to the same.

    Fewer tokens than the clip has are filled up with zeros, as VACE does with its control sequence.
    """
    rows = output.flatten(2)
    if rows.shape[2] < tokens:  # a pad by nothing is a copy
        rows = pad(rows, (0, tokens - rows.shape[2]))
    rows = rows.transpose(1, 2)
    # Laid out token by token, as the blocks want it.
    return rows.index_select(1, positions).transpose(1, 2)


def frames_in_batch(output: Tensor, positions: Tensor, tokens: int) -> Tensor:
    """[batch * frames, tokens of a frame, channels]; if tokens are left out, [batch, tokens, channels]."""
    moved = output.reshape(-1, tokens, output.shape[2]).index_select(1, positions)
    return moved.view(output.shape) if positions.numel() == tokens else moved


def behind_text(output: Tensor, positions: Tensor, tokens: int) -> Tensor:
    """[batch, text and then the clip, channels]; the text stays."""
    text, clip = output.split([output.shape[1] - tokens, tokens], dim=1)
    return torch.cat([text, clip.index_select(1, positions)], dim=1)
