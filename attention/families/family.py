"""What is to be known about one transformer class: the type of a row of the table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attention.backends import TokenGrid
from attention.families.moves import Move
from attention.forward import TextTokens

# Configuration of a transformer, and the named arguments of one forward pass.
Config = Any
Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PerToken:
    """An argument of the transformer with one entry for each token of the clip on one dimension.

    Where the argument is absent, or that dimension is not as long as the clip, it is no such argument.
    """

    name: str
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """Self-attention that text takes part in.

    Attributes:
        text: how many tokens of text there are in a pass, and how many of them are no padding.
        processor: class of Diffusers' processor, which ours replaces.
        rotate: rotary embedding: [batch, tokens, heads, head_dim] and what the layer is given, to the like.
        masked: whether the layers are given a mask, which says the same as ``text``.
    """

    text: Callable[[Arguments], TextTokens]
    processor: str
    rotate: Callable[[Tensor, Any], Tensor]
    masked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerFamily:
    """One Diffusers transformer class.

    Attributes:
        self_attention: regular expression of the names of the self-attention modules.
        grid: tokens of the clip in a pass.
        moves: where tokens are put into the backend's order, and where back into the raster's.
        per_token: arguments that are put into that order, too.
        joint: text in self-attention; None: it is in cross-attention only.
        stays: whether tokens of this pass cannot be moved once for all layers.
        refused: why a pass cannot run at all.
    """

    self_attention: str
    grid: Callable[[Config, Arguments], TokenGrid]
    moves: tuple[Move, ...]
    per_token: tuple[PerToken, ...] = ()
    joint: Joint | None = None
    stays: Callable[[Config, Arguments], bool] = lambda config, arguments: False
    refused: Callable[[Config, Arguments], str | None] = lambda config, arguments: None
