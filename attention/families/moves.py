"""How a module's output is put into another token order. Each function gives back the shape it was given.

Knows shapes. Does not know which module of which model has them: that is in the table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from attention.backends import TokenOrder

# A module's output and the positions in it that the tokens of the new order have.
Mover = Callable[[Any, Tensor], Any]


@dataclass(frozen=True, slots=True)
class Move:
    """The output of ``module`` is put into the backend's order, or ``back`` into the raster's."""

    module: str
    mover: Mover
    back: bool = False

    def apply(self, output: Any, order: TokenOrder) -> Any:
        """The output in its other order."""
        return self.mover(output, order.inverse if self.back else order.order)


def along(dim: int) -> Mover:
    """Tokens on this dimension of a tensor, or of each of several."""

    def move(output: Tensor | tuple[Tensor, ...], positions: Tensor) -> Tensor | tuple[Tensor, ...]:
        if isinstance(output, Tensor):
            return output.index_select(dim, positions)
        return tuple(table.index_select(dim, positions) for table in output)

    return move


def voxels(output: Tensor, positions: Tensor) -> Tensor:
    """[batch, channels, time, height, width] to [batch, channels, tokens], which flattens to the same.

    Fewer tokens than the clip has are filled up with zeros, as VACE does with its control sequence.
    """
    tokens = output.flatten(2)
    tokens = pad(tokens, (0, positions.numel() - tokens.shape[2])).transpose(1, 2)
    # Laid out token by token, as the blocks want it.
    return tokens.index_select(1, positions).transpose(1, 2)


def frames_in_batch(output: Tensor, positions: Tensor) -> Tensor:
    """[batch * frames, tokens of a frame, channels]."""
    tokens = output.reshape(-1, positions.numel(), output.shape[2])
    return tokens.index_select(1, positions).view(output.shape)


def behind_text(output: Tensor, positions: Tensor) -> Tensor:
    """[batch, text and then the clip, channels]; the text stays."""
    text = output.shape[1] - positions.numel()
    moved = output.clone()
    moved[:, text:] = output[:, text:].index_select(1, positions)
    return moved
