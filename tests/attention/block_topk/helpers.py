"""Inputs, the truth and the error budget shared by the tests of all implementations."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention.block_topk.boxes import BoxPattern
from attention.block_topk.layout import BoxLayout, box_layout
from attention.block_topk.reference import attend_selected, members
from attention.block_topk.selection import box_means, box_scores, kept_counts, selected_boxes
from attention.block_topk.triton_selection import box_means_triton
from attention.choice import Impl
from attention.tiles import Grid
from tests.attention.precision import sequential_product

# Kernels run on the GPU where there is one, else through Triton's interpreter.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    """One call of the operator."""

    grid: Grid
    top_k: float
    tile_thw: Grid | None = None
    block_size: int | None = None
    anchor_stride: int | None = None
    anchor_offset: int = 0
    pooled_rest: bool = False
    text: int = 0
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32

    @property
    def pattern(self) -> BoxPattern:
        """Boxes and anchors."""
        return BoxPattern(self.tile_thw, self.block_size, self.anchor_stride, self.anchor_offset)

    @property
    def tokens(self) -> int:
        """Text and clip."""
        return self.text + self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def scale(self) -> float:
        """The default one."""
        return float(self.head_dim**-0.5)

    def layout(self, device: str = DEVICE) -> BoxLayout:
        """The order of its tokens."""
        return box_layout(self.pattern, self.grid, torch.device(device), self.text)


# Tiles have 16 to 128 keys: boxes below, at and above that, ranges of several boxes, no multiple of anything.
CASES = (
    Case((3, 4, 5), 3, tile_thw=(2, 2, 3), kv_heads=1, head_dim=64),
    Case((1, 10, 13), 1, block_size=37, batch=2, heads=1, kv_heads=1, head_dim=72, pooled_rest=True),
    Case((3, 4, 5), 0.3, tile_thw=(2, 2, 2), anchor_stride=5, anchor_offset=2, text=3, pooled_rest=True),
    Case((1, 16, 24), 0.1, block_size=128, heads=1, kv_heads=1, head_dim=128),  # whole tiles only
    Case((2, 3, 4), 2, block_size=5, anchor_stride=1, pooled_rest=True),  # all anchors: dense
    Case((2, 3, 3), 1, tile_thw=(4, 4, 4), pooled_rest=True),  # one box: dense
    Case((1, 9, 10), 2, block_size=30, anchor_stride=7, heads=1, kv_heads=1, head_dim=256),
    Case((3, 4, 5), 1, block_size=20, heads=4, kv_heads=2, head_dim=96, pooled_rest=True),
    Case((2, 3, 4), 1, tile_thw=(1, 3, 4), text=70, batch=2, heads=1, kv_heads=1, head_dim=80),
    Case((1, 7, 9), 5, block_size=7, heads=1, kv_heads=1, pooled_rest=True),
)


def inputs(
    case: Case, dtype: torch.dtype, device: str = DEVICE, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v [batch, tokens, heads, head_dim] in the caller's order."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(case.batch, case.tokens, heads, case.head_dim, generator=generator)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def selection(case: Case, q: Tensor, k: Tensor, impl: Impl) -> tuple[Tensor, Tensor]:
    """Scores, and the boxes that the implementation keeps: [batch, heads, boxes, boxes]."""
    layout = case.layout(str(q.device))
    mean = box_means_triton if impl == "triton" and layout.boxes else box_means
    q, k = (x.index_select(1, layout.order) for x in (q, k))
    scores = box_scores(mean(q, layout), mean(k, layout), case.scale)
    return scores, selected_boxes(scores, layout.always, kept_counts(layout, case.top_k)[0])


def exact(case: Case, q: Tensor, k: Tensor, v: Tensor, selected: Tensor) -> Tensor:
    """The definition in float64, for these kept boxes."""
    member = members(case.pattern, case.grid, case.text).to(q.device)
    q, k, v = q.double(), k.double(), v.double()
    return attend_selected(q, k, v, member, selected, pooled_rest=case.pooled_rest, scale=case.scale)


def relative_error(out: Tensor, truth: Tensor) -> float:
    """Norm of the difference over norm of the truth."""
    return float((out.double() - truth).norm() / truth.norm())


def budget(
    case: Case, q: Tensor, k: Tensor, v: Tensor, selected: Tensor, truth: Tensor, impl: Impl = "triton"
) -> float:
    """Error allowed to an implementation: that of the same maths in the inputs' dtype, plus one rounding.

    The same maths is eager, with the library's matrix products or with products that add up one term after
    another, as a kernel does; for ``torch`` also PyTorch's fused attention, its building block, with a mask.
    """
    member = members(case.pattern, case.grid, case.text).to(q.device)
    group = case.heads // case.kv_heads
    weights = member.float() / member.sum(1)[:, None]
    means = [torch.einsum("bkhd,jk->bjhd", x.float(), weights).to(q.dtype) for x in (k, v)]
    keys, values = (
        torch.cat([x, mean], dim=1).repeat_interleave(group, 2).transpose(1, 2)
        for x, mean in zip((k, v), means, strict=True)
    )
    bias, rows = _bias(case, member, selected, q.dtype), q.transpose(1, 2)

    def stepwise(product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return product((product(rows, keys.mT) * case.scale + bias).softmax(-1), values)

    results = [stepwise(torch.matmul), stepwise(sequential_product)]
    if impl == "torch":
        results.append(scaled_dot_product_attention(rows, keys, values, attn_mask=bias, scale=case.scale))
    errors = [relative_error(result.transpose(1, 2), truth) for result in results]
    return max(errors) + torch.finfo(q.dtype).eps


def _bias(case: Case, member: Tensor, selected: Tensor, dtype: torch.dtype) -> Tensor:
    """[batch, heads, tokens, tokens and boxes]: what is added to the scores."""
    boxes = len(member)
    outside = ~member.any(0)
    of_row = selected.new_ones(*selected.shape[:2], case.tokens, boxes)  # kept by a token's box
    seen = selected.new_ones(*selected.shape[:2], case.tokens, case.tokens)
    if boxes:
        number = member.int().argmax(0)
        of_row = selected[:, :, number] | outside[:, None]
        seen = of_row[..., number] | outside
    rest = (~of_row if case.pooled_rest else torch.zeros_like(of_row)).double()
    rest = (rest * member.sum(1)).log()
    return torch.cat(
        [torch.zeros_like(seen, dtype=torch.float64).masked_fill(~seen, float("-inf")), rest], -1
    ).to(dtype)
