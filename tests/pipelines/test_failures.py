"""What stopped a job, as the job contract says it."""

import gc
import logging
import weakref

import pytest
import torch

from configs.job import JobCancelledError, JobFailedError
from pipelines.failures import ended_by, is_out_of_memory

SHAPE = "9 frames of 64x64 on cpu"
# No machine has the address space for this.
TOO_MANY_BYTES = 2**50


def _caught_from_torch() -> Exception:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(TOO_MANY_BYTES, dtype=torch.uint8)
    return caught.value


def test_a_failed_allocation_on_the_cpu_is_out_of_memory() -> None:
    error = ended_by(_caught_from_torch(), "vae_decode", SHAPE)
    assert isinstance(error, JobFailedError)
    assert (error.code, error.retryable) == ("out_of_memory", False)
    assert error.message.startswith(f"out of memory in vae_decode for {SHAPE}: ")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB"),
        MemoryError("numpy"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory: you tried"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
    ids=lambda error: str(error)[-20:],
)
def test_other_kinds_of_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_other_runtime_errors_are_not_out_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(OSError("Cannot allocate memory"))


def test_job_errors_keep_what_they_say() -> None:
    error = ended_by(JobFailedError("bad_output", "flat", retryable=True), "vae_decode", SHAPE)
    assert isinstance(error, JobFailedError)
    assert (error.code, error.message, error.retryable) == ("bad_output", "flat", True)
    assert isinstance(ended_by(JobCancelledError(), "denoise", SHAPE), JobCancelledError)


def test_an_unknown_error_is_internal_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    empty: dict[str, int] = {}
    with pytest.raises(KeyError) as caught:
        empty["latents"]
    error = ended_by(caught.value, "denoise", SHAPE)
    assert isinstance(error, JobFailedError)
    assert (error.code, error.retryable) == ("internal", False)
    assert error.message.startswith(f"KeyError in denoise for {SHAPE}: 'latents' ({__file__}:")
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[1] is caught.value


def test_an_error_before_the_first_stage() -> None:
    error = ended_by(_caught_from_torch(), None, SHAPE)
    assert isinstance(error, JobFailedError)
    assert "before the first stage" in error.message


def test_the_new_error_keeps_no_tensor_alive() -> None:
    def fail() -> None:
        tensor = torch.zeros(3)
        kept.append(weakref.ref(tensor))
        raise JobFailedError("bad_output", "flat")

    kept: list[weakref.ref[torch.Tensor]] = []
    try:
        fail()
    except JobFailedError as error:
        outcome = ended_by(error, "denoise", SHAPE)
    gc.collect()
    assert kept[0]() is None
    assert outcome.__traceback__ is None
    assert outcome.__cause__ is None
    assert outcome.__context__ is None
