"""Inputs and the error budget shared by the tests of all implementations of sparse_attn."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention.choice import Impl
from attention.selected.api import sparse_attn
from tests.attention.precision import sequential_product

# Kernels run on the GPU where there is one, else through Triton's interpreter.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NONE, DUPLICATES, EMPTY_ROW = 0, 1, 2  # what the first queries list


@dataclass(frozen=True)
class Case:
    """One call of the operator."""

    heads: int
    width: int
    rows: int
    listed: int
    queries: int = 3
    batch: int = 1


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call."""

    q: Tensor
    kv: Tensor
    sink: Tensor
    topk_idxs: Tensor

    def double(self) -> "Inputs":
        """The same values in float64."""
        return replace(self, q=self.q.double(), kv=self.kv.double())


def inputs(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
    """Random tensors: -1 stands anywhere, a query lists nothing, one row twice; a head has no sink.

    Rows that nothing lists are NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(case.batch, case.queries, case.heads, case.width, generator=generator)
    kv = torch.randn(case.batch, case.rows, case.width, generator=generator)
    lists = torch.randint(-1, case.rows, (case.batch, case.queries, case.listed), generator=generator)
    lists[torch.rand(lists.shape, generator=generator) < 0.2] = -1
    if case.queries > EMPTY_ROW:
        lists[:, EMPTY_ROW] = -1
        lists[:, DUPLICATES, : case.listed // 2] = case.rows - 1
    for sequence, rows in zip(lists, kv, strict=True):
        unlisted = torch.ones(case.rows, dtype=torch.bool)
        unlisted[sequence[sequence >= 0]] = False
        rows[unlisted] = float("nan")
    sink = 2 + torch.randn(case.heads, generator=generator)
    sink[0] = float("-inf")
    return Inputs(q.to(device, dtype), kv.to(device, dtype), sink.to(device), lists.int().to(device))


def run(x: Inputs, impl: Impl) -> Tensor:
    """The operator on these inputs."""
    return sparse_attn(x.q, x.kv, x.sink, x.topk_idxs, impl=impl)


def exact(x: Inputs) -> Tensor:
    """The definition in float64."""
    return run(x.double(), "reference")


def relative_error(out: Tensor, truth: Tensor) -> float:
    """Norm of the difference over norm of the truth."""
    return float((out.double() - truth).norm() / truth.norm().clamp_min(1e-300))


def budget(x: Inputs, truth: Tensor) -> float:
    """Error allowed to an implementation: that of the same maths in the inputs' dtype, plus one rounding.

    The same maths is eager, with the library's matrix products or with products that add up one term after
    another, as a kernel does.
    """
    errors = [relative_error(eager(x, product), truth) for product in (torch.matmul, sequential_product)]
    return max(errors) + torch.finfo(x.q.dtype).eps


def eager(x: Inputs, product: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> Tensor:
    """The same maths, step by step in the inputs' own dtype."""
    is_key = x.topk_idxs >= 0
    rows = torch.stack([kv[lists.clamp(0).long()] for kv, lists in zip(x.kv, x.topk_idxs, strict=True)])
    rows = torch.where(is_key[..., None], rows, 0)
    scores = product(x.q, rows.mT) * x.q.shape[3] ** -0.5
    scores = scores.masked_fill(~is_key[:, :, None], float("-inf"))
    sink = x.sink.to(x.q.dtype)[:, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], dim=3).softmax(3)[..., :-1]
    return product(weights.nan_to_num(0), rows)  # NaN where there is nothing, not even a sink
