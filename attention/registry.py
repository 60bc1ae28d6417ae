"""Attention backends by name, made from the settings that a caller gave."""

from dataclasses import dataclass, fields
from typing import get_args

from torch import Tensor

from attention.anchor_local.backend import AnchorLocalBackend
from attention.backends import Backend, BlockUnit, DenseBackend, TokenOrderName, WindowUnit
from attention.block_topk.backend import BlockTopKBackend
from attention.block_topk.boxes import BoxPattern
from attention.choice import Impl, Precision
from attention.layout import Pattern
from attention.pattern import AnchorLocalPattern
from attention.tiles import TilePattern
from attention.window_sink.backend import WindowBackend
from attention.window_sink.sinks import SinkMode

# Which settings each backend has.
BACKENDS = {
    "anchor_local": (
        "token_order",
        "block_size",
        "block_unit",
        "tile_thw",
        "anchor_stride",
        "anchor_offset",
        "anchor_rotation",
        "precision",
    ),
    "block_topk": ("block_size", "tile_thw", "anchor_stride", "anchor_offset", "top_k", "pooled_rest"),
    "dense": (),
    "window": ("window", "window_unit", "global_frames", "sinks", "sink_mode"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """Settings of any backend; None: not given."""

    token_order: TokenOrderName | None = None
    block_size: int | None = None
    block_unit: BlockUnit | None = None
    tile_thw: tuple[int, int, int] | None = None
    anchor_stride: int | None = None
    anchor_offset: int | None = None
    anchor_rotation: bool | None = None
    precision: Precision | None = None
    window: tuple[int | None, int | None] | int | None = None
    window_unit: WindowUnit | None = None
    global_frames: int | None = None
    sinks: Tensor | None = None
    sink_mode: SinkMode | None = None
    top_k: float | None = None
    pooled_rest: bool | None = None

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
        return _anchor_local(given, impl)
    if name == "block_topk":
        if given.top_k is None:
            raise ValueError("backend block_topk needs top_k")
        boxes = BoxPattern(given.tile_thw, given.block_size, given.anchor_stride, given.anchor_offset or 0)
        return BlockTopKBackend(boxes, given.top_k, bool(given.pooled_rest), impl)
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


def _anchor_local(given: Given, impl: Impl) -> AnchorLocalBackend:
    order = given.token_order or "raster"
    if order not in get_args(TokenOrderName):
        known = ", ".join(get_args(TokenOrderName))
        raise ValueError(f"token_order must be one of {known}, got {order!r}")
    needed, useless = ("block_size", ["tile_thw"])
    if order == "tile":
        needed, useless = ("tile_thw", ["block_size", "block_unit"])
    if foreign := [name for name in useless if name in given.names]:
        raise ValueError(f"token_order {order} takes no {', '.join(foreign)}")
    if getattr(given, needed) is None or given.anchor_stride is None:
        raise ValueError(f"backend anchor_local needs {needed} and anchor_stride")
    stride, offset = given.anchor_stride, given.anchor_offset or 0
    pattern: Pattern
    if given.tile_thw is not None:
        pattern = TilePattern(given.tile_thw, stride, offset)
    else:
        pattern = AnchorLocalPattern(given.block_size or 0, stride, offset)
    return AnchorLocalBackend(
        pattern,
        impl,
        given.block_unit or "tokens",
        anchor_rotation=bool(given.anchor_rotation),
        precision=given.precision or "full",
    )
