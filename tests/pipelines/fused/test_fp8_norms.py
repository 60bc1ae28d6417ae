"""Norms quantised as they are computed: exactly what quantising the stored norm gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelines.fp8 import FORMAT, NEEDED_CAPABILITY, quantise_rows
from pipelines.fused.fp8_norms import add_norm_fp8, add_norm_fp8_, norm_fp8
from pipelines.fused.norms import add_norm, add_norm_, norm

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= NEEDED_CAPABILITY
DEVICES = ["cpu", *(["cuda"] if HAS_FP8 else [])]
DTYPES = [torch.bfloat16, torch.float32]
EPS = 1e-6
BATCH, TOKENS = 2, 5

# The quantised one, the other, and what follows the hidden states.
CALLS: dict[str, tuple[Any, Any, Callable[..., tuple[Any, ...]]]] = {
    "norm": (norm_fp8, norm, lambda x, rows, of_tokens: (None, None, of_tokens, rows, 3, EPS)),
    "affine norm": (norm_fp8, norm, lambda x, rows, of_tokens: (*rows[0, :2], None, None, -1, EPS)),
    "add_norm": (
        add_norm_fp8,
        add_norm,
        lambda x, rows, of_tokens: (x, *rows[0, :2], of_tokens[:, :1], None, 2, -1, EPS),
    ),
    "add_norm_": (
        add_norm_fp8_,
        add_norm_,
        lambda x, rows, of_tokens: (x, None, None, of_tokens, rows, -1, 3, EPS),
    ),
}


def given(name: str, device: str, dtype: torch.dtype, channels: int) -> tuple[Any, ...]:
    def noise(*shape: int, seed: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device)

    hidden, x = (noise(BATCH, TOKENS, channels, seed=seed).to(dtype) for seed in (0, 1))
    hidden[1, 2] = 0
    rows = noise(1, 6, channels, seed=2)
    return hidden, *CALLS[name][2](x, rows, noise(BATCH, TOKENS, 6, channels, seed=3).to(dtype))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [48, 1536, 5120])
def test_rows_are_those_of_the_stored_norm(name: str, device: str, dtype: torch.dtype, channels: int) -> None:
    quantised, plain, _ = CALLS[name]
    ours, theirs = (given(name, device, dtype, channels) for _ in range(2))
    *summed, rows, scale = quantised(*ours)
    *expected_sum, normed = _listed(plain(*theirs))
    expected, expected_scale = quantise_rows(normed.flatten(0, 1))
    assert (rows.dtype, rows.shape) == (FORMAT, normed.shape)
    assert all(map(torch.equal, [*summed, ours[0]], [*expected_sum, theirs[0]]))
    found, expected = rows.float(), expected.float().view(normed.shape)
    if device == "cpu":
        assert torch.equal(found, expected)
        assert torch.equal(scale, expected_scale)
        return
    # Threads hold other columns of wide rows for a store in 8 bits: other sums, rarely another rounding.
    torch.testing.assert_close(scale, expected_scale, rtol=2.0**-7, atol=0)
    step = torch.maximum(expected.abs() / 8, torch.tensor(2.0**-6, device=device))
    assert bool(((found - expected).abs() <= step).all())
    assert (found != expected).float().mean() < 0.01


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("device", DEVICES)
def test_schema_and_fake_tell_the_truth(name: str, device: str) -> None:
    # They are for inference: nothing is registered for gradients.
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(CALLS[name][0], given(name, device, torch.bfloat16, 48), test_utils=checks)


def _listed(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)
