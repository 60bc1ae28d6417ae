"""Hopper's kernel as threads on the CPU, beside the Triton kernel."""

import pytest
import torch

from attention import AnchorLocalPattern, anchor_local_layout
from attention.anchor_local import hopper
from attention.anchor_local.torch_impl import anchor_local_torch
from tests.attention.emulated_gluon import emulated

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, it runs there")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("tokens", "block", "stride"), [(700, 150, 7), (1, 1, 1), (300, 300, 1), (513, 40, 4)]
)
def test_equals_the_pytorch_implementation(tokens: int, block: int, stride: int, head_dim: int) -> None:
    layout = anchor_local_layout(AnchorLocalPattern(block, stride), tokens, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, tokens, heads, head_dim, generator=generator).bfloat16() for heads in (2, 1, 1))
    out = torch.full_like(q, float("nan"))
    with emulated(hopper, processors=3):
        hopper.anchor_local_hopper(q, k, v, layout, head_dim**-0.5, out=out)
        over = q.clone()
        hopper.anchor_local_hopper(over, k, v, layout, head_dim**-0.5, out=over)
    assert torch.equal(over, out)
    exact = anchor_local_torch(q.double(), k.double(), v.double(), layout, head_dim**-0.5)
    assert (out.double() - exact).norm() / exact.norm() < 2**-8  # weights and results are rounded once each
