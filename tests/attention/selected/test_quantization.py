"""Rounding through FP8 and FP4 against the tables of their values."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention.selected.quantization import hadamard, through_fp4, through_fp8

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3() -> Tensor:
    """All finite magnitudes: 3 bits of mantissa, bias 7, subnormals; the last code is NaN."""
    values = [
        mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(16)
        for mantissa in range(8)
    ]
    return torch.tensor(values[:-1], dtype=torch.float64)


def nearest(x: Tensor, values: Tensor) -> Tensor:
    """Of these magnitudes, with x's sign; ties to the one with an even index, that is an even mantissa."""
    distance = (x.abs()[..., None] - values).abs()
    odd = torch.arange(len(values)) % 2
    best = (distance == distance.amin(-1, keepdim=True)).double() * (2 - odd)
    return values[best.argmax(-1)] * x.sign()


def test_fp4_rounds_to_the_nearest_ties_to_even() -> None:
    """Blocks whose peak is 6 have scale 1."""
    x = torch.linspace(-6, 6, 97, dtype=torch.float64)  # steps of an eighth: all ties are among them
    blocks = torch.zeros(97, 32, dtype=torch.float64)
    blocks[:, 0], blocks[:, 1] = 6, x
    out = through_fp4(blocks)[:, 1]
    assert torch.equal(out, nearest(x, torch.tensor(E2M1, dtype=torch.float64)))


def test_fp8_rounds_to_the_nearest() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, dtype=torch.float64, generator=generator) * 100
    x = x.clamp(-448, 448).float().double()
    blocks = torch.zeros(500, 64, dtype=torch.float64)
    blocks[:, 0], blocks[:, 1] = 448, x
    out = through_fp8(blocks)
    assert bool((out[:, 0] == 448).all())
    assert torch.equal(out[:, 1], nearest(x, e4m3()))


@pytest.mark.parametrize(
    ("through", "block", "most", "least"), [(through_fp8, 64, 448.0, 2.0**-9), (through_fp4, 32, 6.0, 0.5)]
)
def test_scales_are_the_least_powers_of_two_that_fit(
    through: Callable[[Tensor], Tensor], block: int, most: float, least: float
) -> None:
    """A block times a power of two rounds alike; above the most, the least is half a step and lost."""
    x = torch.randn(7, 2 * block)
    for power in (-8, -3, 1, 9):
        torch.testing.assert_close(through(x * 2.0**power), through(x) * 2.0**power, rtol=0, atol=0)
    blocks = torch.zeros(2, block)
    blocks[:, 0], blocks[:, 1] = torch.tensor([most, most * 1.01]), least
    assert through(blocks)[:, :2].tolist() == [[most, least], [most, 0]]


def test_fp8_has_a_least_scale() -> None:
    """That of a peak of 1e-4: 2^-22. A value of 1e-6 is 4.19 of it, and stored as 4."""
    assert through_fp8(torch.full((64,), 1e-6)).tolist() == [4 * 2.0**-22] * 64


@pytest.mark.parametrize(("through", "block"), [(through_fp8, 64), (through_fp4, 32)])
def test_zeros_stay_and_blocks_are_their_own(through: Callable[[Tensor], Tensor], block: int) -> None:
    x = torch.randn(3, 2 * block)
    x[:, block:] = 0
    out = through(x)
    assert bool((out[:, block:] == 0).all())
    loud = x.clone()
    loud[:, block:] = 1e6
    assert torch.equal(through(loud)[:, :block], out[:, :block])
    for dtype in (torch.bfloat16, torch.float64):
        assert through(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("size", [1, 2, 8, 128])
def test_hadamard_is_the_matrix(size: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    x = torch.randn(3, size, dtype=torch.float64)
    torch.testing.assert_close(hadamard(x), x @ matrix / size**0.5)
    torch.testing.assert_close(hadamard(hadamard(x)), x)
