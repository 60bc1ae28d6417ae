"""anchor_local as a backend: all layers run on anchors-first order."""

from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from attention.anchor_local.api import anchor_local_ordered, implementation
from attention.backends import BackendSettings, BlockUnit, TokenGrid, TokenOrder
from attention.choice import Impl, Precision, check_impl, check_precision
from attention.layout import Pattern, clip_layout
from attention.pattern import AnchorLocalPattern
from attention.tiles import TilePattern


@dataclass(frozen=True, slots=True)
class AnchorLocalBackend:
    """A pattern of the raster or of boxes.

    Attributes:
        pattern: of the first denoise step.
        block_unit: what the block size of a pattern of the raster counts.
        anchor_rotation: the offset of the anchors grows by one a step, so that no token is one for ever.
        precision: of sparse calls; as for ``anchor_local_attention``.

    Raises:
        ValueError: an implementation that knows no order but the caller's or has no such precision, or a
            unit that is none.
    """

    pattern: Pattern
    impl: Impl = "auto"
    block_unit: BlockUnit = "tokens"
    anchor_rotation: bool = False
    precision: Precision = "full"

    name = "anchor_local"
    differs_by_layer = False
    takes_some_heads = True
    why_never_dense = None

    def __post_init__(self) -> None:
        check_impl(self.impl)
        check_precision(self.precision, self.impl, None)
        if self.block_unit not in get_args(BlockUnit):
            known = ", ".join(get_args(BlockUnit))
            raise ValueError(f"block_unit must be one of {known}, got {self.block_unit!r}")
        if self.impl == "reference":
            raise ValueError(
                "impl='reference' cannot be swapped in: it is defined on the caller's token order"
            )

    @property
    def settings(self) -> BackendSettings:
        """The pattern."""
        pattern = self.pattern
        raster = pattern if isinstance(pattern, AnchorLocalPattern) else None
        return BackendSettings(
            token_order="raster" if raster else "tile",
            block_size=raster.block_size if raster else None,
            block_unit=self.block_unit if raster else None,
            tile_thw=pattern.tile_thw if isinstance(pattern, TilePattern) else None,
            anchor_stride=pattern.anchor_stride,
            anchor_offset=pattern.anchor_offset,
            anchor_rotation=self.anchor_rotation,
            precision=self.precision,
        )

    def check(self, layers: int, heads: int, joint: bool) -> None:
        """Any transformer will do."""

    def at_step(self, step: int) -> "AnchorLocalBackend":
        """The offset moved on by so many tokens, if it rotates."""
        if not self.anchor_rotation:
            return self
        offset = (self.pattern.anchor_offset + step) % self.pattern.anchor_stride
        return replace(self, pattern=replace(self.pattern, anchor_offset=offset))

    def plan(self, grid: TokenGrid) -> "AnchorLocalPlan":
        """The pattern over this grid."""
        pattern = self.pattern
        if isinstance(pattern, AnchorLocalPattern) and self.block_unit == "frames":
            pattern = replace(pattern, block_size=pattern.block_size * grid.frame_tokens)
        return AnchorLocalPlan(pattern, grid, self.impl, self.precision)


@dataclass(frozen=True, slots=True)
class AnchorLocalPlan:
    """The pattern over a clip."""

    pattern: Pattern
    grid: TokenGrid
    impl: Impl
    precision: Precision = "full"

    def allowed_pairs(self, text: int) -> int:
        """(query, key) pairs that attend."""
        tokens = self.grid.tokens
        if isinstance(self.pattern, AnchorLocalPattern):
            video = self.pattern.allowed_pairs(tokens)
        else:
            video = self.pattern.allowed_pairs(self.grid.thw)
        return video + 2 * text * tokens + text * text

    def order(self, device: torch.device) -> TokenOrder:
        """Anchors first."""
        layout = clip_layout(self.pattern, self.grid.thw, device)
        return TokenOrder(layout.key_order, layout.query_inverse)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int, text: int) -> Tensor:
        """[batch, tokens, heads, head_dim] in that order, behind the text."""
        layout = clip_layout(self.pattern, self.grid.thw, q.device, text)
        return anchor_local_ordered(q, k, v, layout, scale=scale, impl=self.impl, precision=self.precision)

    def attend_over(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int, text: int) -> None:
        """The same, written over q: no query is read after the tile that it is in was written."""
        layout = clip_layout(self.pattern, self.grid.thw, q.device, text)
        anchor_local_ordered(q, k, v, layout, scale=scale, impl=self.impl, precision=self.precision, out=q)

    def implementation(self, q: Tensor) -> str:
        """torch, triton or gluon."""
        return implementation(self.impl, q, self.precision)
