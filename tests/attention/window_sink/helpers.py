"""Inputs and the error budget shared by the tests of all implementations."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from attention import window_sink_attention
from attention.window_sink.reference import allowed
from attention.window_sink.sinks import SinkMode
from attention.window_sink.window import Window
from tests.attention.precision import sequential_product

# Kernels run on the GPU where there is one, else through Triton's interpreter.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    """One call of the operator."""

    lengths: tuple[int, ...]
    window: tuple[int | None, int | None]
    causal: bool = False
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32
    sink_mode: SinkMode | None = None
    unit: int = 1
    global_keys: int = 0
    global_queries: int = 0

    @property
    def seen(self) -> Window:
        """What attends to what."""
        return Window(*self.window, self.unit, self.global_keys, self.global_queries, self.causal)

    def with_sinks(self, mode: SinkMode | None) -> "Case":
        """The same call with these sinks."""
        return replace(self, sink_mode=mode)

    def arguments(self, sinks: Tensor) -> dict[str, Any]:
        """Keyword arguments of the operator."""
        used = None if self.sink_mode is None else sinks
        return {
            "window": self.window,
            "unit": self.unit,
            "global_keys": self.global_keys,
            "global_queries": self.global_queries,
            "causal": self.causal,
            "sinks": used,
            "sink_mode": self.sink_mode,
        }


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    sinks: Tensor


# Tiles have 32 and 64 rows: lengths at, below and above them; windows below, at and above a tile and longer
# than their sequences; empty sequences in front, between and behind.
CASES = (
    Case((5,), (8, 8), heads=4, kv_heads=4, head_dim=64),
    Case((37, 5), (64, 64), heads=32, kv_heads=8, head_dim=64),
    Case((0, 100, 1, 64, 0), (32, 0), heads=4, kv_heads=2, head_dim=72),
    Case((65, 63), (0, 32), heads=4, kv_heads=4, head_dim=80),
    Case((513,), (32, 32), heads=2, kv_heads=1, head_dim=96),
    Case((100, 37), (1000, 1000), heads=4, kv_heads=2, head_dim=128),
    Case((600, 0, 129), (64, 64), heads=2, kv_heads=1, head_dim=64),
    Case((1024,), (8, 8), heads=1, kv_heads=1, head_dim=64),
    Case((200,), (None, None), kv_heads=1, head_dim=64),
    Case((130, 20), (None, 3), causal=True, head_dim=48),
    Case((90,), (0, 0)),
    Case((70, 3), (40, None), head_dim=256, heads=1, kv_heads=1),
    # Units below, at and above a tile and longer than a sequence; ragged last units; globals that end within
    # a unit, behind a window, and behind the sequence; queries that are global and keys that are not.
    Case((300, 40), (1, 1), unit=35, global_keys=35),
    Case((500,), (2, 0), unit=64, global_keys=3, heads=2, kv_heads=1, head_dim=64),
    Case((230, 0, 90), (0, 1), unit=100, global_keys=130, global_queries=40),
    Case((150, 7), (0, 0), unit=1000, global_queries=5, head_dim=72),
    Case((260,), (9, 5), global_keys=70, global_queries=70, head_dim=64),
    Case((190,), (20, 0), causal=True, global_keys=50),
    Case((170, 60), (1, 3), causal=True, unit=24, global_keys=30, global_queries=90),
    Case((130,), (4, 4), global_keys=200, head_dim=48),
    Case((700,), (1, 1), unit=128, global_keys=128, global_queries=128, heads=1, kv_heads=1, head_dim=64),
)


def inputs(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
    """Random tensors; sinks are as large as scores that matter."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(case.lengths)
    q, k, v = (
        torch.randn(total, heads, case.head_dim, generator=generator).to(device, dtype)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    sinks = 2 + torch.randn(case.heads, generator=generator)
    bounds = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32)
    return Inputs(q, k, v, bounds.to(device), sinks.to(device))


def run(case: Case, x: Inputs, impl: str, **changed: Any) -> Tensor:
    """The operator on these inputs."""
    arguments = case.arguments(x.sinks) | {"impl": impl} | changed
    return window_sink_attention(x.q, x.k, x.v, x.cu_seqlens, **arguments)


def exact(case: Case, x: Inputs) -> Tensor:
    """The definition in float64."""
    return run(case, Inputs(x.q.double(), x.k.double(), x.v.double(), x.cu_seqlens, x.sinks), "reference")


def relative_error(out: Tensor, truth: Tensor) -> float:
    """Norm of the difference over norm of the truth."""
    return float((out.double() - truth).norm() / truth.norm())


def eager(case: Case, x: Inputs, product: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> Tensor:
    """The same maths, step by step in the inputs' own dtype."""
    group = case.heads // case.kv_heads
    out = torch.empty_like(x.q)
    sinks = x.sinks.to(x.q.dtype)[:, None, None]
    for begin, end in pairwise(x.cu_seqlens.tolist()):
        q, k, v = (part[begin:end].transpose(0, 1) for part in (x.q, x.k, x.v))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        positions = torch.arange(end - begin, device=q.device)
        scores = product(q, k.mT) * case.head_dim**-0.5
        if case.sink_mode == "key0_bias":
            scores[:, :, :1] += sinks
        scores = scores.masked_fill(~allowed(case.seen, positions, positions), float("-inf"))
        if case.sink_mode == "null_logit":
            scores = torch.cat([scores, sinks.expand(-1, end - begin, 1)], 2)
        weights = scores.softmax(-1)[:, :, : end - begin]
        out[begin:end] = product(weights, v).transpose(0, 1)
    return out


def budget(case: Case, x: Inputs, truth: Tensor) -> float:
    """Error allowed to an implementation: that of eager maths, plus one rounding of the output.

    Eager with the library's matrix products, or with products that add up one term after another.
    """
    results = (eager(case, x), eager(case, x, sequential_product))
    return max(relative_error(result, truth) for result in results) + torch.finfo(x.q.dtype).eps
