"""Choice of device and number formats."""

import time
from collections.abc import Callable

import pytest
import torch

from configs.compute import VaeDtype
from pipelines.precision import Precision, PrecisionError, choose_precision, faster_on_cpu

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)], ids=str
)
def test_named_dtype_is_kept_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    assert choose_precision("cpu", name) == Precision(CPU, dtype, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "vae"),
    [("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)],
    ids=str,
)
def test_the_vae_may_have_a_format_of_its_own(dtype: str, name: VaeDtype, vae: torch.dtype) -> None:
    assert choose_precision("cpu", dtype, name) == Precision(CPU, getattr(torch, dtype), vae)
    assert choose_precision("auto", "auto", name).vae == vae


def test_auto_names_a_device_and_dtypes_of_this_machine() -> None:
    precision = choose_precision("auto", "auto")
    assert precision.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert {precision.network, precision.vae} <= {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(
    ("slow", "chosen"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str
)
def test_the_faster_dtype_wins(slow: torch.dtype, chosen: torch.dtype) -> None:
    def work(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        def sleep() -> torch.Tensor:
            time.sleep(0.02 if dtype == slow else 0.001)
            return torch.empty(0)

        return sleep

    assert faster_on_cpu(work) == chosen


def test_equally_fast_means_float32() -> None:
    def work(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        def sleep() -> torch.Tensor:
            time.sleep(0.02)
            return torch.empty(0, dtype=dtype)

        return sleep

    assert faster_on_cpu(work) == torch.float32


@pytest.mark.parametrize("device", ["tpu", "mps", "cpu:x"])
def test_unknown_device(device: str) -> None:
    with pytest.raises(
        PrecisionError, match=f"device '{device}' is not one of auto, cpu, cuda, cuda:<index>"
    ):
        choose_precision(device, "auto")


def test_absent_cuda_device() -> None:
    index = torch.cuda.device_count()
    with pytest.raises(PrecisionError, match=f"device 'cuda:{index}': torch .* sees {index} CUDA devices"):
        choose_precision(f"cuda:{index}", "auto")


def test_unknown_dtype() -> None:
    with pytest.raises(PrecisionError, match="dtype 'float16' is not one of auto, float32, bfloat16"):
        choose_precision("cpu", "float16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_runs_the_vae_in_float32() -> None:
    assert choose_precision("cuda", "auto") == Precision(
        torch.device("cuda", 0), torch.bfloat16, torch.float32
    )
