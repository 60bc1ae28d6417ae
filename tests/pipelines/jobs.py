"""Runs whole jobs for the tests, and looks at what they leave behind."""

import gc
from pathlib import Path

import pytest
import torch

from configs.job import (
    JobEvent,
    JobFailedError,
    JobFinished,
    JobParameters,
    JobPaths,
    JobResult,
)
from pipelines import LoadedPipeline, run_job

# How often a job of 3 steps and 3 latent frames asks whether it is cancelled: at its start, before 2 text
# blocks, before 2 blocks and after each of 3 steps, before 3 latent frames, before rounding each of 9 frames,
# between the two pictures, before waiting for the file, and now and then until that is written and probed.
AT_START, IN_TEXT = 1, 2
IN_FIRST_STEP, IN_SECOND_STEP, AFTER_LAST_STEP = 4, 8, 12
IN_DECODE, IN_ROUNDING, AFTER_THUMBNAIL, IN_FILE = 14, 20, 25, 26


class CancelAt:
    """``is_cancelled`` that says yes from its n-th call on, or never."""

    def __init__(self, call: int | None = None) -> None:
        self.calls = 0
        self._call = call

    def __call__(self) -> bool:
        self.calls += 1
        return self._call is not None and self.calls >= self._call


def finished(
    loaded: LoadedPipeline, params: JobParameters, path: Path, checkpoint: Path | None = None
) -> tuple[JobResult, list[JobEvent]]:
    """Run a job that must succeed: its result and all its events."""
    paths = JobPaths(path, checkpoint=checkpoint)
    events = list(run_job(loaded, params, paths, is_cancelled=CancelAt()))
    last = events[-1]
    assert isinstance(last, JobFinished)
    return last.result, events


def failure_of(loaded: LoadedPipeline, params: JobParameters, path: Path) -> JobFailedError:
    """Run a job that must fail: its error."""
    with pytest.raises(JobFailedError) as caught:
        list(run_job(loaded, params, JobPaths(path), is_cancelled=CancelAt()))
    return caught.value


def bytes_of_tensors() -> int:
    """Bytes of all tensors that Python can reach in this process, weights included."""
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter)
    }
    return sum(storages.values())


def hook_count(loaded: LoadedPipeline) -> int:
    """Hooks on all modules of the pipeline."""
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks)
        for network in (loaded.pipe.text_encoder, loaded.pipe.transformer, loaded.pipe.vae)
        for module in network.modules()
    )


def self_attention_processors(loaded: LoadedPipeline) -> list[object]:
    """What a swap exchanges."""
    return [block.attn1.processor for block in loaded.pipe.transformer.blocks]
