"""Turns whatever stopped a job into one of the two errors that the job contract knows.

Knows: how running out of memory looks. Does not know: how a job runs. The errors made here carry no traceback
and no cause: those would keep every tensor of the failed job alive for as long as the error is.
"""

import logging
import traceback

import torch

from configs.job import JobCancelledError, JobFailedError, Stage

logger = logging.getLogger(__name__)
# Torch's CPU allocator, and what CUDA's libraries say when they cannot get their workspace.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def ended_by(error: BaseException, stage: Stage | None, shape: str) -> JobCancelledError | JobFailedError:
    """The public error for ``error``, met in ``stage`` of a clip of that shape."""
    if isinstance(error, JobCancelledError):
        return JobCancelledError(*error.args)
    if isinstance(error, JobFailedError):
        return JobFailedError(error.code, error.message, retryable=error.retryable)
    where = f"in {stage}" if stage else "before the first stage"
    if is_out_of_memory(error):
        return JobFailedError("out_of_memory", f"out of memory {where} for {shape}: {first_line(error)}")
    logger.error("job failed %s", where, exc_info=error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return JobFailedError(
        "internal",
        f"{type(error).__name__} {where} for {shape}: {first_line(error)} ({last.filename}:{last.lineno})",
    )


def first_line(error: BaseException) -> str:
    """What the error says, without the advice that torch adds."""
    return str(error).partition("\n")[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or host allocation failed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
