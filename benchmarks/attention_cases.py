"""Shapes of the anchor_local benchmarks, their inputs, and errors against float64.

Knows the operator and its definition. Does not know what is timed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.anchor_local.api import implementation, kernel
from attention.anchor_local.reference import allowed
from attention.choice import Impl, Precision
from attention.layout import AnchorLocalLayout, anchor_local_layout
from attention.pattern import AnchorLocalPattern

FP8_ERROR = 4e-2
"""The most relative error that fp8 may have."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One problem: a head count and a pattern over so many tokens."""

    tokens: int
    heads: int
    head_dim: int
    block_size: int
    anchor_stride: int

    @property
    def pattern(self) -> AnchorLocalPattern:
        """The pattern."""
        return AnchorLocalPattern(self.block_size, self.anchor_stride)

    @property
    def density(self) -> float:
        """Share of the pairs that attend."""
        return self.pattern.allowed_pairs(self.tokens) / self.tokens**2

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.head_dim**-0.5)

    @property
    def title(self) -> str:
        """For a row of a table."""
        return f"{self.tokens:,} x {self.heads} x {self.head_dim}, {self.block_size}, {self.anchor_stride}"


SHAPES = (
    Shape(32_760, 12, 128, 3120, 16),
    Shape(32_760, 40, 128, 3120, 16),
    Shape(32_760, 40, 128, 1560, 32),
    Shape(75_600, 12, 128, 3600, 16),
    Shape(75_600, 40, 128, 7200, 32),
    Shape(75_600, 40, 128, 3600, 64),
    Shape(32_768, 24, 64, 4096, 16),
)
FP8_SHAPE = Shape(32_768, 12, 128, 4096, 16)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Random q, k, v [1, tokens, heads, head_dim] in the layout's order."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: AnchorLocalLayout


def inputs(shape: Shape, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """The same numbers in every call on one kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    size = (1, shape.tokens, shape.heads, shape.head_dim)
    q, k, v = (torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(3))
    return Inputs(q, k, v, anchor_local_layout(shape.pattern, shape.tokens, q.device))


def kernel_call(
    shape: Shape, x: Inputs, precision: Precision = "full", impl: Impl = "auto"
) -> Callable[[], Tensor]:
    """The kernel that runs here as a call without arguments; its output begins as NaN."""
    out = torch.full_like(x.q, float("nan"))
    chosen = implementation(impl if x.q.is_cuda else "triton", x.q, precision)
    call = kernel(chosen, precision)
    return lambda: call(x.q, x.k, x.v, x.layout, shape.scale, out=out)


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """Sampled rows of the exact result: ``rows`` [r] and float64 ``exact`` [r, heads, head_dim].

    ``eager_error`` is the relative error of the same rows in eager maths in the inputs' dtype.
    """

    rows: Tensor
    exact: Tensor
    eager_error: float

    def error(self, out: Tensor) -> float:
        """Relative error of an output [1, tokens, heads, head_dim]."""
        return _relative(out[0, self.rows].double(), self.exact)


def truth(shape: Shape, x: Inputs) -> Truth:
    """The first 64 anchors, and about 400 rows evenly from shortly before the last anchor to the end."""
    step = max(1, shape.tokens // 400)
    rows = torch.cat([torch.arange(64), torch.arange(max(0, x.layout.anchors - 32), shape.tokens, step)])
    rows = rows.clamp(max=shape.tokens - 1).to(x.q.device)
    mask = allowed(shape.pattern, x.layout.key_order[rows], x.layout.key_order)

    def dense_rows(dtype: torch.dtype) -> Tensor:
        parts = []
        for head in range(shape.heads):
            scores = x.q[0, rows, head].to(dtype) @ x.k[0, :, head].to(dtype).T * shape.scale
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            parts.append(weights @ x.v[0, :, head].to(dtype))
        return torch.stack(parts, dim=1).double()

    exact = dense_rows(torch.float64)
    return Truth(rows, exact, _relative(dense_rows(x.q.dtype), exact))


def _relative(out: Tensor, exact: Tensor) -> float:
    return float((out - exact).norm() / exact.norm())
