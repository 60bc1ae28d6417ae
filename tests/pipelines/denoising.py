"""Runs the denoise stage alone for the tests."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from configs.job import AttentionReport, JobParameters, StepFinished
from pipelines import LoadedPipeline
from pipelines.attending import attention_report, swapped
from pipelines.cancel import CancelFlag
from pipelines.checkpoint import Checkpoint
from pipelines.denoise import StepWatch, denoise
from pipelines.sampler import take_state
from pipelines.text import encode_text


@dataclass(frozen=True)
class Denoised:
    """What came of it, and the state after each step but the last."""

    latents: torch.Tensor
    events: list[StepFinished]
    attention: AttentionReport
    checkpoints: list[Checkpoint]


def denoised(
    loaded: LoadedPipeline,
    params: JobParameters,
    *,
    is_cancelled: Callable[[], bool] = lambda: False,
    resume: Checkpoint | None = None,
) -> Denoised:
    """Text and denoise stages of a job, from its start or from a checkpoint."""
    events: list[StepFinished] = []
    checkpoints: list[Checkpoint] = []
    pipe, flag = loaded.pipe, CancelFlag(is_cancelled)
    with swapped(loaded, params) as handle:

        def keep(step: int, latents: torch.Tensor) -> None:
            state, report = take_state(pipe.scheduler), attention_report(handle)
            checkpoints.append(Checkpoint(step, latents.clone(), state, report, ()))

        watch = StepWatch(loaded.device, params, handle, flag, events.append, keep)
        latents = denoise(loaded, params, encode_text(loaded, params), watch, resume)
        report = attention_report(handle, resume.attention if resume else None)
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    return Denoised(latents, events, report, checkpoints)
