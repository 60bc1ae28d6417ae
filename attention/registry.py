"""Attention backends by name, made from the settings that a caller gave."""

from dataclasses import dataclass, fields

from torch import Tensor

from attention.anchor_local.backend import AnchorLocalBackend
from attention.backends import Backend, DenseBackend, WindowUnit
from attention.choice import Impl
from attention.pattern import AnchorLocalPattern
from attention.window_sink.backend import WindowBackend
from attention.window_sink.sinks import SinkMode

# Which settings each backend has.
BACKENDS = {
    "anchor_local": ("block_size", "anchor_stride", "anchor_offset"),
    "dense": (),
    "window": ("window", "window_unit", "global_frames", "sinks", "sink_mode"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """Settings of any backend; None: not given."""

    block_size: int | None = None
    anchor_stride: int | None = None
    anchor_offset: int | None = None
    window: tuple[int | None, int | None] | int | None = None
    window_unit: WindowUnit | None = None
    global_frames: int | None = None
    sinks: Tensor | None = None
    sink_mode: SinkMode | None = None

    @property
    def names(self) -> list[str]:
        """The settings that were given."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


def build_backend(name: str, given: Given, impl: Impl) -> Backend:
    """The backend of this name.

    Raises:
        ValueError: no such backend, a setting of another one, one that is missing, or a value out of range.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; known: {', '.join(BACKENDS)}")
    if foreign := [setting for setting in given.names if setting not in BACKENDS[name]]:
        raise ValueError(f"backend {name} takes no {', '.join(foreign)}")
    if name == "anchor_local":
        if given.block_size is None or given.anchor_stride is None:
            raise ValueError("backend anchor_local needs block_size and anchor_stride")
        pattern = AnchorLocalPattern(given.block_size, given.anchor_stride, given.anchor_offset or 0)
        return AnchorLocalBackend(pattern, impl)
    if name == "window":
        if given.window is None:
            raise ValueError("backend window needs window")
        return WindowBackend(
            window=(given.window, given.window) if isinstance(given.window, int) else given.window,
            window_unit=given.window_unit or "frames",
            global_frames=given.global_frames or 0,
            sinks=given.sinks,
            sink_mode=given.sink_mode,
            impl=impl,
        )
    return DenseBackend()
