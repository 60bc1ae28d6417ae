"""Saves a job's checkpoints and finds the one that it goes on from.

Knows: when a checkpoint is due, and that none is worth a failed job: whatever is wrong with one becomes a
warning. Does not know: the file's format.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from configs.job import AttentionReport, CheckpointSaved, JobParameters
from pipelines.checkpoint import (
    Checkpoint,
    CheckpointError,
    Identity,
    read_checkpoint,
    weights_sha256,
    write_checkpoint,
)
from pipelines.loading import LoadedPipeline
from pipelines.manifests import environment_of
from pipelines.sampler import UnknownStateError, take_state

_CUDA_INDEX = re.compile(r"^cuda:\d+")


class CheckpointKeeper:
    """The checkpoints of one job, at one path."""

    def __init__(
        self,
        loaded: LoadedPipeline,
        params: JobParameters,
        path: Path,
        *,
        check_cancel: Callable[[], None],
        emit: Callable[[CheckpointSaved], None],
        warn: Callable[[str], None],
    ) -> None:
        self._identity = identity_of(loaded, params)
        self._device = loaded.device
        self._every = params.checkpoint_every
        self._total = params.num_inference_steps
        self._path = path
        self._check_cancel = check_cancel
        self._emit = emit
        self._warn = warn
        self._has_failed = False

    def find(self) -> Checkpoint | None:
        """The checkpoint that an earlier attempt left, if it is good."""
        try:
            return read_checkpoint(self._path, self._identity, self._device)
        except CheckpointError as error:
            self._warn(f"the checkpoint was not used, the job began at step 1: {error}")
            return None

    def is_due(self, step: int) -> bool:
        """Whether to save after this step: every so many as the job asks, and after the last."""
        return step == self._total or (self._every > 0 and step % self._every == 0)

    def save(
        self,
        step: int,
        latents: torch.Tensor,
        scheduler: Any,
        attention: AttentionReport,
        text_warnings: tuple[str, ...],
    ) -> None:
        """Write the checkpoint after ``step``; only a cancel stops the job."""
        try:
            sampler = take_state(scheduler) if step < self._total else {}
            checkpoint = Checkpoint(step, latents, sampler, attention, text_warnings)
            size = write_checkpoint(checkpoint, self._identity, self._path, before_chunk=self._check_cancel)
        except (OSError, UnknownStateError) as error:
            self._warn_once(f"the checkpoint after step {step} could not be written: {error}")
            return
        self._emit(CheckpointSaved(step, size))

    def _warn_once(self, text: str) -> None:
        if not self._has_failed:
            self._warn(text)
        self._has_failed = True


def identity_of(loaded: LoadedPipeline, params: JobParameters) -> Identity:
    """Whose checkpoints a job's are. Devices of one kind are the same, whatever their number."""
    environment = environment_of(loaded)
    device = _CUDA_INDEX.sub("cuda", environment.device)
    networks = [getattr(loaded.pipe, name) for name in loaded.family.network_names]
    with loaded.placement.undisturbed():
        digest = weights_sha256([network for network in networks if network is not None])
    return Identity(
        parameters=params,
        environment=environment.model_copy(update={"device": device}),
        weights_sha256=digest,
    )
