"""The kernels, interpreted without a GPU, against float64."""

import itertools

import pytest
import torch
from torch import Tensor

from pipelines.fp8 import FORMAT, quantise_rows
from pipelines.fused.kernels import add_norm_triton, rms_norm_triton
from pipelines.fused.norms import reference_add, reference_norm
from pipelines.fused.rotary import reference_norm_rotate
from pipelines.row_kernels import quantise_rows_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
# Powers of two, with a rest, with a rest that is none, odd, Wan's.
COLUMNS = [2, 32, 48, 100, 129, 1536, 5120]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def unset(x: Tensor) -> Tensor:
    """What the kernel does not fill is seen."""
    return torch.full_like(x, float("nan"))


def assert_near(found: Tensor, expected: Tensor, roundings: int = 1) -> None:
    tolerance = roundings * TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["plain", "affine", "clip", "tokens", "tokens, table"])
def test_layer_norm(columns: int, dtype: torch.dtype, kind: str) -> None:
    batch, tokens = 2, 3
    x = 3 + noise(batch, tokens, columns, dtype=dtype)
    weight, bias = (noise(columns, seed=seed) if kind == "affine" else None for seed in (1, 2))
    modulation = None
    if kind not in ("plain", "affine"):
        modulation = noise(batch, 1 if kind == "clip" else tokens, 6, columns, dtype=dtype, seed=3)
    table = noise(1, 6, columns, seed=4) if "table" in kind else None
    out = unset(x)
    shift = -1 if modulation is None else 3
    add_norm_triton(x, None, None, out, weight, bias, modulation, table, -1, shift, EPS)
    weight, bias, modulation, table = (
        None if each is None else each.double() for each in (weight, bias, modulation, table)
    )
    assert_near(out, reference_norm(x.double(), weight, bias, modulation, table, shift, EPS))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("gate", "in_place", "norms"), list(itertools.product([-1, 2], [False, True], [False, True]))
)
def test_residual_and_norm(columns: int, dtype: torch.dtype, gate: int, in_place: bool, norms: bool) -> None:
    batch, tokens = 2, 3
    hidden = noise(batch, tokens, columns, dtype=dtype)
    x = noise(batch, tokens, columns, dtype=dtype, seed=1)
    modulation = noise(batch, 1, 6, columns, seed=2)
    weight, bias = noise(columns, seed=3), noise(columns, seed=4)
    expected = reference_add(hidden.double(), x.double(), modulation.double(), None, gate)
    summed = hidden if in_place else unset(hidden)
    normed = unset(hidden) if norms else None
    add_norm_triton(x, hidden, summed, normed, weight, bias, modulation, None, gate, -1, EPS)
    assert_near(summed, expected)
    if normed is not None:
        # Of the rounded sum.
        assert_near(
            normed, reference_norm(summed.double(), weight.double(), bias.double(), None, None, -1, EPS)
        )


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_a_quantised_norm_is_the_norm_quantised(columns: int, dtype: torch.dtype, adds: bool) -> None:
    batch, tokens = 2, 3
    x = noise(batch, tokens, columns, dtype=dtype)
    x[1, 1] = 0
    hidden = noise(batch, tokens, columns, dtype=dtype, seed=1) if adds else None
    modulation = noise(batch, tokens, 6, columns, seed=2)
    gate = 2 if adds else -1
    normed = unset(x)
    summed, other = (unset(x) if adds else None for _ in range(2))
    add_norm_triton(x, hidden, summed, normed, None, None, modulation, None, gate, 3, EPS)
    rows, scales = unset(x.to(FORMAT)), unset(noise(batch * tokens, 1))
    add_norm_triton(x, hidden, other, rows, None, None, modulation, None, gate, 3, EPS, scales)
    if summed is not None and other is not None:
        assert torch.equal(other, summed)
    expected, expected_scales = quantise_rows_triton(normed.view(-1, columns))
    assert torch.equal(rows.float().view(-1, columns), expected.float())
    assert torch.equal(scales, expected_scales)
    torch.testing.assert_close(scales, quantise_rows(normed.view(-1, columns))[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (2, 16), (3, 16), (5, 6), (12, 128)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pairs", [False, True])
def test_rms_norm_and_rotary_of_views(heads: int, head_dim: int, dtype: torch.dtype, pairs: bool) -> None:
    batch, tokens, columns = 2, 3, heads * head_dim
    qkv = noise(batch, tokens, 3 * columns, dtype=dtype)
    before = qkv.clone()
    weights = noise(2, columns, dtype=dtype, seed=1)
    cos, sin = noise(2, 1, tokens, 1, head_dim, seed=2)
    if pairs:
        cos, sin = cos[..., 0::2].contiguous(), sin[..., 1::2].contiguous()
    q, k, v = qkv.chunk(3, dim=-1)
    rms_norm_triton(q, k, weights[0], weights[1], cos, sin, heads, EPS)
    for found, old, weight in zip((q, k), before.chunk(3, dim=-1), weights, strict=False):
        expected = reference_norm_rotate(
            old.double(), weight.double(), cos.double(), sin.double(), heads, EPS
        )
        # The norm is rounded before it is turned, and what is turned may nearly cancel.
        assert_near(found, expected, roundings=8)
    assert torch.equal(v, before.chunk(3, dim=-1)[2])


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rms_norm_alone(columns: int, dtype: torch.dtype) -> None:
    x, weight = noise(2, 3, columns, dtype=dtype), noise(columns, dtype=dtype, seed=1)
    expected = torch.nn.functional.rms_norm(x.double(), (columns,), weight.double(), EPS)
    rms_norm_triton(x, None, weight, None, None, None, 1, EPS)
    assert_near(x, expected)


def test_no_tokens() -> None:
    empty = noise(2, 0, 32)
    add_norm_triton(empty, None, None, empty, None, None, None, None, -1, -1, EPS)
    rms_norm_triton(empty, None, noise(32), None, None, None, 1, EPS)
