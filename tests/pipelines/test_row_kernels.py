"""The kernels on rows against PyTorch; interpreted where there is no GPU."""

import pytest
import torch
from torch.testing import assert_close

from pipelines.fp8 import LARGEST, quantise_rows
from pipelines.joined_attention import norm_and_rotate_
from pipelines.row_kernels import norm_and_rotate_triton, quantise_rows_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("columns", [16, 64, 100, 1536])
@pytest.mark.parametrize("gelu", [False, True])
def test_rows_are_quantised_as_in_pytorch(columns: int, gelu: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, columns + 8, generator=generator) * torch.logspace(-3, 2, 5)[:, None]
    x[3] = 0
    x = x.bfloat16().to(DEVICE)[:, :columns]
    wide = torch.nn.functional.gelu(x.float(), approximate="tanh") if gelu else x.float()
    expected, expected_scale = quantise_rows(wide.cpu())
    found, scale = quantise_rows_triton(x, gelu=gelu)
    assert (found.dtype, found.shape, scale.shape) == (expected.dtype, x.shape, (5, 1))
    # tanh.approx has 11 bits.
    assert_close(scale.cpu(), expected_scale, rtol=2.0**-9 if gelu else 1e-6, atol=1e-12)
    assert not found[3].float().any()
    a, b = found.cpu().float(), expected.float()
    if DEVICE.type == "cpu":  # Triton's interpreter loses the carry of what is rounded up to a power of two
        a = torch.where(b.abs().log2() % 1 == 0, b, a)
    # A step of e4m3 where two roundings differ; of the largest value that is 32.
    assert bool(((a - b).abs() <= torch.maximum(b.abs() / 8, torch.tensor(2.0**-6))).all())
    assert (a != b).float().mean() < (0.1 if gelu else 0.01)
    assert bool((a.abs() <= LARGEST).all())


def test_no_row_is_no_launch() -> None:
    found, scale = quantise_rows_triton(torch.empty(0, 32, device=DEVICE))
    assert (found.shape, scale.shape) == ((0, 32), (0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 32), (12, 128)])
def test_q_and_k_are_normed_and_rotated_and_v_is_left(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    width = heads * head_dim
    qkv = torch.randn(2, 5, 3 * width, generator=generator).to(dtype)
    weights = [(1 + 0.1 * torch.randn(width, generator=generator)).to(dtype) for _ in range(2)]
    angle = torch.randn(1, 5, 1, head_dim // 2, generator=generator)
    tables = angle.cos(), angle.sin()
    expected, found = qkv.clone(), qkv.to(DEVICE)
    norm_and_rotate_(expected, *weights, *tables, heads, 1e-6)
    q_weight, k_weight, cos, sin = (x.to(DEVICE) for x in (*weights, *tables))
    norm_and_rotate_triton(found, q_weight, k_weight, cos, sin, heads, 1e-6)
    # In bfloat16 the norm rounds, once or twice, and so does the rotation of values up to 5.
    bound = 2.0**-4 if dtype == torch.bfloat16 else 1e-5
    assert_close(found.cpu(), expected, rtol=0, atol=bound)
    assert (found.cpu() - expected).float().norm() < bound / 8 * expected.float().norm()
    assert torch.equal(found[..., 2 * width :].cpu(), qkv[..., 2 * width :])
