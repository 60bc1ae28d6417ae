"""The parts of benchmarks/window.py that need no GPU."""

import pytest
import torch

from benchmarks.gpu import Timing
from benchmarks.window import (
    LinearRow,
    Shape,
    attend,
    doubling_ratios,
    error_rows,
    error_table,
    flex_with_window,
    inputs,
    linear_table,
    sdpa_with_mask,
)

SMALL = Shape(300, 4, 2, 64, 32)
FRAMES = Shape(300, 4, 2, 64, 1, unit=40, global_keys=50)


@pytest.fixture(scope="module")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [SMALL, FRAMES])
def test_errors_of_both_modes_and_of_mistaking_them(device: str, shape: Shape) -> None:
    rows = error_rows(shape, device)
    assert [row.mode for row in rows] == ["null_logit", "key0_bias"]
    for row in rows:
        assert 0 < row.error <= row.eager_error
        assert row.other_mode_error > 10 * row.error
    assert error_table(rows).count("\n") == 3


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("shape", [SMALL, FRAMES])
def test_peers_compute_the_same(device: str, shape: Shape) -> None:
    x = inputs(shape, device)
    ours = attend(shape, x, None).float()
    for peer in (sdpa_with_mask(shape, device), flex_with_window(shape, device, compiled=False)):
        torch.testing.assert_close(peer(x).float(), ours, atol=2e-2, rtol=2e-2)


def test_a_straight_line_doubles() -> None:
    times = [Timing(seconds, seconds, seconds) for seconds in (1e-4, 2e-4, 5e-4)]
    rows = [LinearRow(2**i, None, time, time, times[0]) for i, time in enumerate(times)]
    assert doubling_ratios(rows) == pytest.approx([2, 2.5])
    assert "| 4 | none | 0.5000 ms | 2.50 | 0.5000 ms | 5.00 |" in linear_table(rows)
