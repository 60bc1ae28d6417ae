"""block_topk as a backend: all layers run on tokens in the order of their boxes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.backends import BackendSettings, TokenGrid, TokenOrder
from attention.block_topk.api import block_topk_ordered, implementation
from attention.block_topk.boxes import BoxPattern, check_top_k
from attention.block_topk.layout import box_layout
from attention.choice import Impl, check_impl


@dataclass(frozen=True, slots=True)
class BlockTopKBackend:
    """Boxes that choose boxes, for each batch entry and head anew in every call.

    Attributes:
        pattern: boxes and anchors.
        top_k: boxes that each box keeps: below 1 a share of all, else a count.
        pooled_rest: whether each of the others takes part as one key.

    Raises:
        ValueError: an implementation that knows no order but the caller's, or a top_k that is none.
    """

    pattern: BoxPattern
    top_k: float
    pooled_rest: bool = False
    impl: Impl = "auto"

    name = "block_topk"
    differs_by_layer = False
    takes_some_heads = True
    why_never_dense = None

    def __post_init__(self) -> None:
        check_impl(self.impl)
        check_top_k(self.top_k)
        if self.impl == "reference":
            raise ValueError(
                "impl='reference' cannot be swapped in: it is defined on the caller's token order"
            )

    @property
    def settings(self) -> BackendSettings:
        """The boxes and how many are kept."""
        has_anchors = self.pattern.anchor_stride is not None
        return BackendSettings(
            block_size=self.pattern.block_size,
            tile_thw=self.pattern.tile_thw,
            anchor_stride=self.pattern.anchor_stride,
            anchor_offset=self.pattern.anchor_offset if has_anchors else None,
            top_k=self.top_k,
            pooled_rest=self.pooled_rest,
        )

    def check(self, layers: int, heads: int, joint: bool) -> None:
        """Any transformer will do."""

    def at_step(self, step: int) -> "BlockTopKBackend":
        """All steps are alike."""
        return self

    def plan(self, grid: TokenGrid) -> "BlockTopKPlan":
        """The boxes of this grid. Raises ValueError if there are too many."""
        self.pattern.boxes(grid.thw)
        return BlockTopKPlan(self, grid)


@dataclass(frozen=True, slots=True)
class BlockTopKPlan:
    """The boxes of a clip."""

    backend: BlockTopKBackend
    grid: TokenGrid

    def allowed_pairs(self, text: int) -> int:
        """Pairs with anchors and text; the others depend on the tensors."""
        first, tokens = self.backend.pattern.boxes(self.grid.thw).anchors + text, self.grid.tokens + text
        return first * tokens + (tokens - first) * first

    def order(self, device: torch.device) -> TokenOrder:
        """Anchors first, then box after box."""
        layout = box_layout(self.backend.pattern, self.grid.thw, device)
        return TokenOrder(layout.order, layout.inverse)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int, text: int) -> Tensor:
        """[batch, tokens, heads, head_dim] in that order, behind the text."""
        return self._attend(q, k, v, scale, text, None)

    def attend_counted(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int, text: int, tally: Tensor
    ) -> Tensor:
        """The same; adds the pairs of queries and keys of kept boxes, over all heads and batch entries."""
        return self._attend(q, k, v, scale, text, tally)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, text: int, tally: Tensor | None
    ) -> Tensor:
        backend = self.backend
        layout = box_layout(backend.pattern, self.grid.thw, q.device, text)
        return block_topk_ordered(
            q,
            k,
            v,
            layout,
            top_k=backend.top_k,
            pooled_rest=backend.pooled_rest,
            scale=scale,
            impl=backend.impl,
            tally=tally,
        )

    def implementation(self, q: Tensor) -> str:
        """torch, triton or gluon."""
        return implementation(self.backend.impl, q)
