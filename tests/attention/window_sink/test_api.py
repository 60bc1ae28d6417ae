import subprocess
import sys
from typing import Any

import pytest
import torch

from attention import window_sink_attention
from tests.attention.window_sink.helpers import DEVICE

Q = torch.randn(20, 4, 16)
K = torch.randn(20, 2, 16)
BOUNDS = torch.tensor([0, 5, 5, 20])
SINKS = torch.zeros(4)
# On a GPU machine no kernel is interpreted, and tensors on the CPU stop before their values are looked at.
CPU_IMPLS = ["reference", "torch", *(["triton"] if DEVICE == "cpu" else [])]


def call(q: torch.Tensor = Q, k: torch.Tensor = K, v: torch.Tensor = K, **changed: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {"cu_seqlens": BOUNDS, "window": (3, 3)} | changed
    return window_sink_attention(q, k, v, arguments.pop("cu_seqlens"), **arguments)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (Q[0], K, K, r"q must be \[total, heads, head_dim\], got shape \(4, 16\)"),
        (Q, K.double(), K, "share dtype and device"),
        (Q.int(), K.int(), K.int(), "must be floating point, got torch.int32"),
        (Q, K, K[:10], "k and v must have one shape"),
        (Q[:10], K, K, "share total and head_dim"),
        (Q, K[..., :8], K[..., :8], "share total and head_dim"),
        (Q[:, :3], K, K, "heads must be a multiple of kv_heads, got 3 and 2"),
        (Q[:, :0], K, K, "heads and head_dim may not be 0"),
        (torch.zeros(20, 1, 264),) * 3 + ("head_dim must be at most 256, got 264",),
        (torch.zeros(1).expand(2**29 + 1, 1, 1),) * 3 + ("total must be at most 536870912, got 536870913",),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(q, k, v)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ((3, -1), "window right must be None .unbounded. or an integer >= 0, got -1"),
        ((2.5, 3), "window left must be None .unbounded. or an integer >= 0, got 2.5"),
        ((True, 3), "window left must be .* got True"),
        (64, r"window must be a pair \(left, right\), got 64"),
        ((1, 2, 3), r"window must be a pair \(left, right\), got \(1, 2, 3\)"),
    ],
)
def test_window_out_of_range(window: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(window=window)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (torch.tensor([0.0, 20.0]), "must be int32 or int64 .* got torch.float32"),
        (torch.tensor([[0, 20]]), r"got torch.int64 of shape \(1, 2\)"),
        (torch.tensor([0]), "both ends of every sequence, got 1 values for 20 tokens"),
        (torch.tensor([], dtype=torch.int32), "both ends of every sequence, got 0 values"),
        (torch.tensor([1, 20]), "must start at 0 and end at total = 20, got 1 and 20"),
        (torch.tensor([0, 19]), "must start at 0 and end at total = 20, got 0 and 19"),
        (torch.tensor([0, 9, 7, 20]), "must not fall, got 9 and then 7 at 1 and 2"),
        (torch.tensor([0, 20], device="meta"), "on the device of q, cpu, got meta"),
    ],
)
@pytest.mark.parametrize("impl", CPU_IMPLS)
def test_bounds_that_do_not_fit(bounds: torch.Tensor, message: str, impl: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(cu_seqlens=bounds, impl=impl)


@pytest.mark.parametrize(
    ("sinks", "mode", "message"),
    [
        (SINKS, None, "sinks need a sink_mode, one of null_logit, key0_bias, got None"),
        (SINKS, "softmax", "one of null_logit, key0_bias, got 'softmax'"),
        (None, "null_logit", "sink_mode 'null_logit' was given without sinks"),
        (SINKS[:2], "null_logit", r"float32 of shape \[heads\] = \[4\], got torch.float32 of shape \(2,\)"),
        (SINKS.bfloat16(), "key0_bias", "sinks must be float32, got torch.bfloat16"),
        (SINKS.to("meta"), "key0_bias", "sinks must be on the device of q, cpu, got meta"),
    ],
)
def test_sinks_and_their_mode_come_together(sinks: torch.Tensor | None, mode: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(sinks=sinks, sink_mode=mode)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scale_must_be_positive_and_finite(scale: float) -> None:
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        call(scale=scale)


def test_unknown_implementation_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="impl must be one of auto, reference, torch, triton, got 'flash'"):
        call(impl="flash")


def test_causal_overrides_what_lies_behind() -> None:
    assert torch.equal(call(window=(3, None), causal=True), call(window=(3, 0)))
    assert torch.equal(call(window=(None, None), causal=True), call(window=(None, 0)))


def test_named_triton_never_falls_back() -> None:
    """Without a GPU and without the interpreter, a named kernel is an error, not another implementation."""
    code = (
        "import torch, attention; x = torch.zeros(4, 1, 16)\n"
        "attention.window_sink_attention(x, x, x, torch.tensor([0, 4]), window=(1, 1), impl='triton')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PATH": "", "PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert "ValueError: impl='triton' needs CUDA tensors" in run.stderr
    wide = (Q.to(DEVICE, torch.float64), *(K.to(DEVICE, torch.float64),) * 2)
    with pytest.raises(ValueError, match=r"takes float32, bfloat16 or float16, got torch\.float64"):
        call(*wide, cu_seqlens=BOUNDS.to(DEVICE), impl="triton")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"unit": 0}, "unit must be an integer >= 1, got 0"),
        ({"global_keys": -1}, "global_keys must be an integer >= 0, got -1"),
        ({"global_queries": 2.0}, "global_queries must be an integer >= 0, got 2.0"),
    ],
)
def test_units_and_globals_out_of_range(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changed)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize(
    "changed",
    [
        {"sinks": SINKS + 1, "sink_mode": "key0_bias"},
        {"sinks": SINKS + 1, "sink_mode": "null_logit", "causal": True, "window": (None, 2)},
        {"unit": 4, "global_keys": 3, "global_queries": 2, "scale": 0.5},
    ],
)
def test_compiles_into_one_graph(changed: dict[str, Any], impl: str) -> None:
    """Also on a CPU, where the operator looks at the values of cu_seqlens."""

    def model(q: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        return call(q * 2, cu_seqlens=bounds, impl=impl, **changed) + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(Q, BOUNDS), model(Q, BOUNDS))
    other = torch.tensor([0, 7, 20])  # other values of the same shape need no other graph
    torch.testing.assert_close(compiled(Q, other), model(Q, other))
    with pytest.raises(ValueError, match="must start at 0 and end at total = 20, got 0 and 19"):
        compiled(Q, torch.tensor([0, 5, 19]))


def test_the_compiled_operator_is_what_it_says() -> None:
    settings = (2, None, 4, 3, 0, False, SINKS, "null_logit", None, "torch")
    torch.library.opcheck(
        torch.ops.reelwright.window_sink_attention.default,
        (Q, K, K, BOUNDS, *settings),
        test_utils=("test_schema", "test_faketensor"),
    )
