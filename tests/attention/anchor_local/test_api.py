import subprocess
import sys

import pytest
import torch

from attention import AnchorLocalPattern, anchor_local_attention, anchor_local_layout, anchor_local_ordered
from attention.choice import Impl
from tests.attention.anchor_local.helpers import DEVICE, Case, exact, inputs, relative_error

Q = torch.randn(2, 20, 4, 16)
K = torch.randn(2, 20, 2, 16)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (Q[0], K, K, r"q must be \[batch, tokens, heads, head_dim\], got shape \(20, 4, 16\)"),
        (Q, K.double(), K, "share dtype and device"),
        (Q.int(), K.int(), K.int(), "must be floating point, got torch.int32"),
        (Q, K, K[:, :10], "k and v must have one shape"),
        (Q[:1], K, K, "share batch and head_dim"),
        (Q, K[..., :8], K[..., :8], "share batch and head_dim"),
        (Q[:, :, :3], K, K, "heads must be a multiple of kv_heads, got 3 and 2"),
        (Q, K[:, :10], K[:, :10], "more queries than tokens: 20 and 10"),
        (Q[:, :0], K, K, "no dimension may be empty"),
        (torch.zeros(1, 4, 1, 264),) * 3 + ("head_dim must be at most 256, got 264",),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        anchor_local_attention(q, k, v, block_size=4, anchor_stride=3)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scale_must_be_positive_and_finite(scale: float) -> None:
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        anchor_local_attention(Q, K, K, block_size=4, anchor_stride=3, scale=scale)


@pytest.mark.parametrize("q_start", [-1, 11])
def test_q_start_out_of_range(q_start: int) -> None:
    with pytest.raises(ValueError, match=r"q_start must lie in 0 .. tokens - queries = 10"):
        anchor_local_attention(Q[:, :10], K, K, block_size=4, anchor_stride=3, q_start=q_start)


def test_unknown_implementation_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="impl must be one of auto, reference, torch, triton, got 'flash'"):
        anchor_local_attention(Q, K, K, block_size=4, anchor_stride=3, impl="flash")  # type: ignore[arg-type]


def test_named_triton_never_falls_back() -> None:
    """Without a GPU and without the interpreter, a named kernel is an error, not another implementation."""
    code = (
        "import torch, attention; x = torch.zeros(1, 4, 1, 16)\n"
        "attention.anchor_local_attention(x, x, x, block_size=2, anchor_stride=2, impl='triton')"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PATH": "", "PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert "ValueError: impl='triton' needs CUDA tensors" in run.stderr
    wide = Q.to(DEVICE, torch.float64), K.to(DEVICE, torch.float64), K.to(DEVICE, torch.float64)
    with pytest.raises(ValueError, match=r"takes float32, bfloat16 or float16, got torch\.float64"):
        anchor_local_attention(*wide, block_size=4, anchor_stride=3, impl="triton")


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_ordered_form_on_ordered_tokens(impl: Impl) -> None:
    case = Case(100, 24, 7, heads=4, kv_heads=2)
    q, k, v = inputs(case, torch.float32, DEVICE)
    layout = anchor_local_layout(AnchorLocalPattern(24, 7), 100, q.device)
    ordered_q, ordered_k, ordered_v = (x[:, layout.key_order] for x in (q, k, v))
    out = anchor_local_ordered(ordered_q, ordered_k, ordered_v, layout, impl=impl)
    assert relative_error(out[:, layout.query_inverse], exact(case, q, k, v)) < 1e-6


def test_ordered_form_checks_its_layout() -> None:
    layout = anchor_local_layout(AnchorLocalPattern(24, 7), 30, Q.device)
    with pytest.raises(ValueError, match="the layout is for 30 queries and 30 tokens, got 20 and 20"):
        anchor_local_ordered(Q, K, K, layout)
    layout = anchor_local_layout(AnchorLocalPattern(24, 7), 20, Q.device)
    with pytest.raises(ValueError, match="defined on the caller's order"):
        anchor_local_ordered(Q, K, K, layout, impl="reference")


def test_importing_attention_costs_no_torch() -> None:
    code = "import sys, attention; assert 'torch' not in sys.modules; attention.density(10, 2, 2)\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
