"""Convolutions on a CPU: which code runs them, and that it gives PyTorch's numbers."""

import contextlib
from collections.abc import Sequence
from multiprocessing import get_context

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from pipelines.convolution import NO_CODE, convolved_by_onednn
from tests.pipelines.address_space import address_space_limit

CPU = torch.device("cpu")
SLOW, ONEDNN = "aten::slow_conv3d_forward", "aten::mkldnn_convolution"


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


def _operators(convolution: nn.Module, x: Tensor, device: torch.device) -> tuple[Tensor, set[str]]:
    """The result on ``x``, and which of the two operators ran."""
    with torch.no_grad(), convolved_by_onednn(device), profile(activities=[ProfilerActivity.CPU]) as ran:
        out = convolution(x)
    return out, {each.key for each in ran.key_averages()} & {SLOW, ONEDNN}


@pytest.mark.parametrize("padding", [0, (0, 1, 1)])
@pytest.mark.parametrize("kernel", [1, 3, (3, 1, 1)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("bias", [True, False])
def test_a_small_convolution_is_onednns_with_the_same_numbers(
    padding: Sequence[int] | int, kernel: Sequence[int] | int, layout: torch.memory_format, bias: bool
) -> None:
    convolution = nn.Conv3d(7, 5, kernel, padding=padding, bias=bias)  # type: ignore[arg-type]
    x = _random(1, 7, 3, 13, 10).contiguous(memory_format=layout)
    usual, before = _operators(convolution, x, torch.device("cuda"))
    out, ran = _operators(convolution, x, CPU)
    assert (before, ran) == ({SLOW}, {ONEDNN})
    torch.testing.assert_close(out, usual)


def test_stride_dilation_and_groups_are_kept() -> None:
    x, weight = _random(1, 8, 9, 9, 9), _random(4, 4, 2, 2, 2)
    usual = F.conv3d(x, weight, None, (2, 1, 2), (1, 0, 1), 2, 2)
    with convolved_by_onednn(CPU):
        torch.testing.assert_close(F.conv3d(x, weight, None, (2, 1, 2), (1, 0, 1), 2, 2), usual)
        torch.testing.assert_close(
            F.conv3d(x, weight, stride=(2, 1, 2), padding=(1, 0, 1), dilation=2, groups=2), usual
        )


@pytest.mark.parametrize(
    ("x", "padding"),
    [
        pytest.param(_random(1, 7, 3, 6, 5, dtype=torch.float64), 0, id="float64"),
        pytest.param(_random(7, 3, 6, 5), 0, id="no batch"),
        pytest.param(_random(1, 7, 3, 6, 5), "same", id="padding by name"),
    ],
)
def test_what_onednn_does_not_take_runs_as_before(x: Tensor, padding: str | int) -> None:
    weight = _random(5, 7, 3, 3, 3, dtype=x.dtype)
    usual = F.conv3d(x, weight, padding=padding)
    with convolved_by_onednn(CPU):
        assert torch.equal(F.conv3d(x, weight, padding=padding), usual)


def _after_a_failure() -> None:
    x, weight = _random(1, 19, 11, 13, 10), _random(23, 19, 3, 5, 3)
    once, none = (1, 1, 1), (0, 0, 0)
    with address_space_limit(0), pytest.raises(RuntimeError, match=NO_CODE):
        torch.mkldnn_convolution(x, weight, None, none, once, once, 1)
    with pytest.raises(RuntimeError, match=NO_CODE):
        torch.mkldnn_convolution(x, weight, None, none, once, once, 1)
    with convolved_by_onednn(CPU):
        out = F.conv3d(x, weight)
    assert torch.equal(out, F.conv3d(x, weight))


def test_what_onednn_once_had_no_memory_for_runs_as_before() -> None:
    """By itself it refuses a shape for ever after that, so this is tried in a process of its own."""
    process = get_context("spawn").Process(target=_after_a_failure)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_nothing_changes_behind_the_block() -> None:
    convolution, x = nn.Conv3d(7, 5, 3), _random(1, 7, 3, 13, 10)
    with contextlib.suppress(ZeroDivisionError), convolved_by_onednn(CPU):
        raise ZeroDivisionError
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as ran:
        convolution(x)
    assert SLOW in {each.key for each in ran.key_averages()}
