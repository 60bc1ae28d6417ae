"""window_sink as the backend ``window``: neighbouring latent frames, or tokens, and the first frames.

The tokens of a clip lie frame by frame, so nothing is moved: a frame is a unit of the window, and the first
frames are the global keys.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

import torch
from torch import Tensor

from attention.anchor_local.api import anchor_local_ordered
from attention.backends import BackendSettings, TokenGrid, WindowUnit
from attention.choice import Impl, check_impl, resolve_impl
from attention.layout import frames_layout
from attention.window_sink.api import check_sinks, window_pair, window_sink_attention
from attention.window_sink.sinks import SinkMode
from attention.window_sink.window import Window, is_count


@dataclass(frozen=True, slots=True, eq=False)
class WindowBackend:
    """A window over a clip.

    Attributes:
        window: (left, right) units that a token sees besides its own; None is unbounded.
        window_unit: what the window counts: latent frames, or tokens in the order frame, row, column.
        global_frames: latent frames at the start whose tokens are keys of every query.
        sinks: float32 [heads], for all layers, or [layers, heads]; on the device of the transformer.
        sink_mode: what they mean, required with them.

    Raises:
        ValueError: a value is out of range.
    """

    window: tuple[int | None, int | None]
    window_unit: WindowUnit = "frames"
    global_frames: int = 0
    sinks: Tensor | None = None
    sink_mode: SinkMode | None = None
    impl: Impl = "auto"

    name = "window"

    def __post_init__(self) -> None:
        left, right = window_pair(self.window)
        Window(left, right)
        if self.window_unit not in get_args(WindowUnit):
            known = ", ".join(get_args(WindowUnit))
            raise ValueError(f"window_unit must be one of {known}, got {self.window_unit!r}")
        if not is_count(self.global_frames):
            raise ValueError(f"global_frames must be an integer >= 0, got {self.global_frames!r}")
        check_impl(self.impl)
        if self.sinks is not None and self.sinks.ndim not in (1, 2):
            raise ValueError(f"sinks must be [heads] or [layers, heads], got {tuple(self.sinks.shape)}")
        sinks = self.sinks if self.sinks is None or self.sinks.ndim == 1 else self.sinks[0]
        check_sinks(sinks, self.sink_mode)

    @property
    def settings(self) -> BackendSettings:
        """The window and the globals."""
        return BackendSettings(
            window=self.window,
            window_unit=self.window_unit,
            global_frames=self.global_frames,
            sink_mode=self.sink_mode,
        )

    @property
    def differs_by_layer(self) -> bool:
        """Whether every layer has sinks of its own."""
        return self.sinks is not None and self.sinks.ndim == 2

    @property
    def takes_some_heads(self) -> bool:
        """Every head has a sink of its own."""
        return self.sinks is None

    @property
    def why_never_dense(self) -> str | None:
        """Dense attention has no sinks."""
        return None if self.sinks is None else "the sinks would not be used"

    def check(self, layers: int, heads: int, joint: bool) -> None:
        """Raise ValueError unless there is a sink for every head, and what there is can run beside text."""
        if joint and self.impl == "reference":
            raise ValueError("impl='reference' cannot be swapped in where text takes part")
        if self.sinks is None:
            return
        if joint:
            raise ValueError("sinks are not supported where text and video share self-attention")
        expected = (heads,) if self.sinks.ndim == 1 else (layers, heads)
        if self.sinks.shape != expected:
            raise ValueError(f"sinks must have shape {expected}, got {tuple(self.sinks.shape)}")

    def at_step(self, step: int) -> "WindowBackend":
        """All steps are alike."""
        return self

    def plan(self, grid: TokenGrid) -> "WindowPlan":
        """The window in tokens of this grid."""
        window = Window.of_clip(self.window, self.window_unit, self.global_frames, grid.frame_tokens)
        return WindowPlan(self, grid, window, window.allowed_pairs(grid.tokens))


@dataclass(frozen=True, slots=True, eq=False)
class WindowPlan:
    """The window over a clip, in tokens."""

    backend: WindowBackend
    grid: TokenGrid
    window: Window
    pairs_of_clip: int

    def allowed_pairs(self, text: int) -> int:
        """(query, key) pairs that attend; text tokens see all and are seen by all."""
        return self.pairs_of_clip + 2 * text * self.grid.tokens + text * text

    def order(self, device: torch.device) -> None:
        """Tokens stay where they are."""
        return

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int, text: int) -> Tensor:
        """[batch, tokens, heads, head_dim]: every batch entry is a sequence."""
        if text and self.backend.window_unit == "frames":
            return self._attend_frames(q, k, v, scale, text)
        sinks, window = self.backend.sinks, self.window
        packed = window_sink_attention(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            _bounds(*q.shape[:2], q.device),
            window=(window.left, window.right),
            unit=window.unit,
            global_keys=window.global_keys + text,
            global_queries=text,
            sinks=sinks if sinks is None or sinks.ndim == 1 else sinks[layer],
            sink_mode=self.backend.sink_mode,
            scale=scale,
            impl=self.backend.impl,
        )
        out: Tensor = packed.unflatten(0, q.shape[:2])
        return out

    def _attend_frames(self, q: Tensor, k: Tensor, v: Tensor, scale: float, text: int) -> Tensor:
        """Frames behind text do not begin at multiples of a frame: each gets a range of its own."""
        backend = self.backend
        layout = frames_layout(backend.window, backend.global_frames, self.grid.thw, q.device, text)
        return anchor_local_ordered(q, k, v, layout, scale=scale, impl=backend.impl)

    def implementation(self, q: Tensor) -> str:
        """reference, torch or triton."""
        return resolve_impl(self.backend.impl, q)


@lru_cache(maxsize=16)  # a model asks at every layer and step
def _bounds(sequences: int, tokens: int, device: torch.device) -> Tensor:
    return torch.arange(0, (sequences + 1) * tokens, tokens, dtype=torch.int32, device=device)
