"""What can be put into self-attention: the contract of a backend, and the dense one.

Knows: what the swap asks of a backend. Does not know: any operator, transformers, or when calls run dense.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from attention.choice import Precision
from attention.window_sink.sinks import SinkMode

WindowUnit = Literal["frames", "tokens"]
BlockUnit = Literal["tokens", "frames"]
TokenOrderName = Literal["raster", "tile"]


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """The video tokens of one forward pass, frame by frame, each in raster order."""

    frames: int
    rows: int
    columns: int

    @property
    def frame_tokens(self) -> int:
        """Tokens of one latent frame."""
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        """Tokens of the clip."""
        return self.frames * self.frame_tokens

    @property
    def thw(self) -> tuple[int, int, int]:
        """Frames, rows, columns."""
        return self.frames, self.rows, self.columns


@dataclass(frozen=True, slots=True, eq=False)
class TokenOrder:
    """Another order of the tokens of a pass, or of those of them that this process has.

    Attributes:
        order: int64 [own tokens], on the device; ordered token i is token ``order[i]`` of the caller.
        inverse: int64 [tokens]; the caller's token r is ordered token ``inverse[r]``.
        gather: [batch, own tokens, channels] to those of all processes, which ``inverse`` counts; None: this
            process has all tokens.
    """

    order: Tensor
    inverse: Tensor
    gather: Callable[[Tensor], Tensor] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the caller."""
        return self.inverse.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """Settings of whichever backend, for reports; None: this backend has no such setting.

    Attributes:
        token_order: how ``anchor_local`` forms blocks: runs of the raster, or boxes (``tile``).
        block_size: of a block of the raster.
        block_unit: what it counts.
        tile_thw: sides of a box: time, height, width.
        anchor_stride, anchor_offset: which tokens are anchors; the offset is that of the first step.
        anchor_rotation: whether the offset grows by one a step.
        window: units to the left and to the right that a token of ``window`` sees; None is unbounded.
        window_unit: what the window counts.
        global_frames: latent frames at the start that every token of ``window`` sees.
        precision: of sparse calls of ``anchor_local``: ``full``, the format of the inputs, or ``fp8``.
        sink_mode: what the sinks of ``window`` mean, if it has any.
        top_k: boxes that a box of ``block_topk`` keeps: below 1 a share of all, else a count.
        pooled_rest: whether each of the others takes part as one key.
    """

    token_order: TokenOrderName | None = None
    block_size: int | None = None
    block_unit: BlockUnit | None = None
    tile_thw: tuple[int, int, int] | None = None
    anchor_stride: int | None = None
    anchor_offset: int | None = None
    anchor_rotation: bool | None = None
    precision: Precision | None = None
    window: tuple[int | None, int | None] | None = None
    window_unit: WindowUnit | None = None
    global_frames: int | None = None
    sink_mode: SinkMode | None = None
    top_k: float | None = None
    pooled_rest: bool | None = None


class Plan(Protocol):
    """A backend on one grid: what the sparse calls of a forward pass do.

    In joint attention ``text`` tokens come before the clip's; they see all and are seen by all.
    """

    def allowed_pairs(self, text: int) -> int:
        """(query, key) pairs that attend, of each head and batch entry."""

    def order(self, device: torch.device) -> TokenOrder | None:
        """The order that ``attend`` wants the clip's tokens in; None: as they come."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int, text: int) -> Tensor:
        """Self-attention of layer ``layer`` on [batch, tokens, heads, head_dim]; returns the shape of q."""

    def implementation(self, q: Tensor) -> str:
        """What computes ``attend`` for such a tensor."""


@runtime_checkable
class OverwritingPlan(Plan, Protocol):
    """A plan that needs no room for its result."""

    def attend_over(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int, text: int) -> None:
        """As ``attend``; the result is written over q."""


@runtime_checkable
class MeasuredPlan(Plan, Protocol):
    """A plan of whose pairs some depend on the tensors; ``allowed_pairs`` is the number of the others."""

    def attend_counted(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int, text: int, tally: Tensor
    ) -> Tensor:
        """As ``attend``; adds those pairs, over all heads and batch entries, to int64 [] ``tally``."""


class Backend(Protocol):
    """Self-attention as one setting says. Immutable; one object serves all passes of all transformers."""

    @property
    def name(self) -> str:
        """As in the settings of a job."""

    @property
    def settings(self) -> BackendSettings:
        """What it was made with."""

    @property
    def differs_by_layer(self) -> bool:
        """Whether ``attend`` looks at the layer; if not, one compiled graph serves all layers."""

    @property
    def takes_some_heads(self) -> bool:
        """Whether ``attend`` may be given some of the heads, not knowing which: each is by itself."""

    @property
    def why_never_dense(self) -> str | None:
        """Why no call may run dense instead; None: any may."""

    def check(self, layers: int, heads: int, joint: bool) -> None:
        """Raise ValueError unless it fits a transformer of so many layers and heads.

        ``joint``: its self-attention has text tokens, too.
        """

    def at_step(self, step: int) -> "Backend":
        """The same in denoise step ``step``, counted from 0."""

    def plan(self, grid: TokenGrid) -> Plan | None:
        """What a pass over this grid does; None: every call is dense."""


@dataclass(frozen=True, slots=True)
class DenseBackend:
    """Replaces nothing; calls are only counted."""

    name: str = "dense"
    settings: BackendSettings = BackendSettings()
    differs_by_layer: bool = False
    takes_some_heads: bool = True
    why_never_dense: str | None = None

    def check(self, layers: int, heads: int, joint: bool) -> None:
        """Any transformer will do."""

    def at_step(self, step: int) -> "DenseBackend":
        """All steps are alike."""
        return self

    def plan(self, grid: TokenGrid) -> None:
        """Every call is dense."""
        return
