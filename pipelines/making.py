"""The part of a job that needs the device: prompt to frames.

Knows: the order of its stages, where it goes on from a checkpoint, and what must be undone afterwards. Does
not know: threads, or the files that frames become.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from attention import SwapHandle
from configs.job import AttentionReport, DecodeReport, JobEvent, JobParameters, RunEnvironment, StepSeconds
from pipelines.attending import attention_report, swapped
from pipelines.cancel import CancelFlag, checked_inside
from pipelines.checkpoint import Checkpoint
from pipelines.checkpointing import CheckpointKeeper
from pipelines.decoding import decode
from pipelines.denoise import StepWatch, denoise, step_seconds
from pipelines.frames import Frames
from pipelines.loading import LoadedPipeline
from pipelines.manifests import environment_of
from pipelines.previewing import Previewer
from pipelines.stages import StageRecorder
from pipelines.text import EncodedText, encode_text


@dataclass(frozen=True)
class Made:
    """Frames, and all that is to be told of how they were made."""

    frames: Frames
    attention: AttentionReport
    decode: DecodeReport
    environment: RunEnvironment
    steps: StepSeconds | None
    resumed_from_step: int | None
    warnings: tuple[str, ...]


class Making:
    """Makes one job's frames on a pipeline that no other job uses meanwhile."""

    def __init__(
        self,
        loaded: LoadedPipeline,
        params: JobParameters,
        checkpoint: Path | None,
        preview_seconds: float,
        flag: CancelFlag,
        emit: Callable[[JobEvent], None],
        stages: StageRecorder,
    ) -> None:
        self._loaded = loaded
        self._params = params
        self._flag = flag
        self._emit = emit
        self._stages = stages
        self._warnings: list[str] = []
        self._previewer = Previewer(loaded, preview_seconds, emit, self._warnings.append)
        self._keeper: CheckpointKeeper | None = None
        if checkpoint is not None:
            self._keeper = CheckpointKeeper(
                loaded,
                params,
                checkpoint,
                check_cancel=flag.check,
                emit=emit,
                warn=self._warnings.append,
            )

    def run(self) -> Made:
        """Every stage up to the frames. Whatever happens, the pipeline is left as it was loaded."""
        loaded, flag = self._loaded, self._flag
        flag.check()
        points = loaded.family.cancel_modules(loaded.pipe)
        with (
            _torch_set_up(loaded.device),
            _restored(loaded),
            swapped(loaded, self._params) as attention,
            checked_inside(points, loaded.device, flag),
        ):
            resume = self._keeper.find() if self._keeper else None
            if resume is not None and resume.step == self._params.num_inference_steps:
                latents, report, seconds = resume.latents, resume.attention, list[float]()
                self._warnings.extend(resume.text_warnings)
            else:
                latents, report, seconds = self._denoised(attention, resume)
            with self._stages.stage("vae_decode"):
                frames, decode_report = decode(loaded, self._params, latents, flag.check)
            self._previewer.learn(latents, frames)
            environment = environment_of(loaded)
        return Made(
            frames=frames,
            attention=report,
            decode=decode_report,
            environment=environment,
            steps=step_seconds(seconds),
            resumed_from_step=resume.step if resume else None,
            warnings=tuple(self._warnings),
        )

    def _denoised(
        self, attention: SwapHandle, resume: Checkpoint | None
    ) -> tuple[torch.Tensor, AttentionReport, list[float]]:
        """Latents, what attention ran, and the seconds of each step."""
        loaded, params = self._loaded, self._params
        with self._stages.stage("text_encode"):
            text = encode_text(loaded, params, while_waiting=self._flag.check)
        self._warnings.extend(text.warnings)

        def report() -> AttentionReport:
            return attention_report(attention, resume.attention if resume else None)

        def between_steps(step: int, latents: torch.Tensor) -> None:
            self._previewer.show(step, latents)
            self._save(step, latents, report(), text)

        with self._stages.stage("denoise"):
            watch = StepWatch(loaded.device, params, attention, self._flag, self._emit, between_steps)
            latents = denoise(loaded, params, text, watch, resume)
            self._save(params.num_inference_steps, latents, report(), text)
        return latents, report(), watch.seconds

    def _save(self, step: int, latents: torch.Tensor, attention: AttentionReport, text: EncodedText) -> None:
        if self._keeper and self._keeper.is_due(step):
            self._keeper.save(step, latents, self._loaded.pipe.scheduler, attention, text.warnings)


@contextlib.contextmanager
def _torch_set_up(device: torch.device) -> Iterator[None]:
    """What torch keeps per thread: no gradients, and the device that kernels are launched on."""
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _restored(loaded: LoadedPipeline) -> Iterator[None]:
    """Leave the pipeline as it was loaded: schedulers and VAEs keep tensors of the last clip."""
    pipe = loaded.pipe
    try:
        yield
    finally:
        used = pipe.scheduler
        pipe.scheduler = type(used).from_config(used.config)
        vars(used).clear()  # it sits in a reference cycle, and would hold latents until the next collection
        loaded.family.forget(pipe)
        pipe.maybe_free_model_hooks()
