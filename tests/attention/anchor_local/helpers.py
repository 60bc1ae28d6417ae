"""Inputs and the error budget shared by the tests of all implementations."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention import AnchorLocalPattern
from attention.anchor_local.reference import allowed, anchor_local_reference
from attention.choice import Impl
from tests.attention.precision import sequential_product

# Kernels run on the GPU where there is one, else through Triton's interpreter.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    """One call of the operator."""

    tokens: int
    block_size: int
    anchor_stride: int
    anchor_offset: int = 0
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32

    @property
    def pattern(self) -> AnchorLocalPattern:
        """Pattern of the case."""
        return AnchorLocalPattern(self.block_size, self.anchor_stride, self.anchor_offset)


# Tiles of 64 and 128 rows: lengths at, below and above them; blocks and strides that divide nothing.
CASES = (
    Case(1, 1, 1),
    Case(5, 8, 9, anchor_offset=7),  # no anchor at all
    Case(63, 10, 5, anchor_offset=2, batch=2, head_dim=72),
    Case(100, 24, 7, heads=4, head_dim=64),
    Case(127, 128, 3, kv_heads=1),  # one block: dense
    Case(129, 40, 1, head_dim=80),  # all anchors: dense
    Case(130, 50, 60, anchor_offset=55, kv_heads=1, head_dim=96),
    Case(257, 64, 16, batch=2, heads=4, kv_heads=2, head_dim=128),
    Case(50, 1, 13, head_dim=48),  # blocks of one token
    Case(400, 133, 2, anchor_offset=1, heads=1, kv_heads=1, head_dim=256),
)


def inputs(
    case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v [batch, tokens, heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(case.batch, case.tokens, heads, case.head_dim, generator=generator)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def exact(case: Case, q: Tensor, k: Tensor, v: Tensor, q_start: int = 0) -> Tensor:
    """The definition in float64."""
    return anchor_local_reference(
        q.double(), k.double(), v.double(), case.pattern, q_start=q_start, scale=case.head_dim**-0.5
    )


def relative_error(out: Tensor, truth: Tensor) -> float:
    """Norm of the difference over norm of the truth."""
    return float((out.double() - truth).norm() / truth.norm())


def budget(case: Case, q: Tensor, k: Tensor, v: Tensor, truth: Tensor, impl: Impl = "triton") -> float:
    """Error allowed to an implementation: that of the same maths in the inputs' dtype, plus one rounding.

    The same maths is eager, with the library's matrix products or with products that add up one term after
    another, as a kernel does; for ``torch`` also PyTorch's fused attention, its building block, with a mask.
    """
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    mask, scale = _mask(case, q.device), case.head_dim**-0.5

    def stepwise(product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        scores = (product(q, k.mT) * scale).masked_fill(~mask, float("-inf"))
        return product(scores.softmax(-1), v)

    results = [stepwise(torch.matmul), stepwise(sequential_product)]
    if impl == "torch":
        results.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
    errors = [relative_error(result.transpose(1, 2), truth) for result in results]
    return max(errors) + torch.finfo(q.dtype).eps


def _mask(case: Case, device: torch.device) -> Tensor:
    positions = torch.arange(case.tokens, device=device)
    return allowed(case.pattern, positions, positions)
