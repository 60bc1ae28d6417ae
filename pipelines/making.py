"""The part of a job that needs the device: prompt to frames.

Knows: the order of its stages, where it goes on from a checkpoint, and what must be undone afterwards. Does
not know: threads, or how frames become files.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from attention import SwapHandle
from configs.compute import ComputeReport
from configs.job import (
    AttentionReport,
    DecodeReport,
    JobEvent,
    JobParameters,
    MemoryReport,
    StepSeconds,
)
from configs.manifest import Manifest
from pipelines.attending import attention_report, parallel_report, swapped
from pipelines.cancel import CancelFlag, checked_inside
from pipelines.checkpoint import Checkpoint
from pipelines.checkpointing import CheckpointKeeper
from pipelines.computing import Computing
from pipelines.decoding import Take, decode
from pipelines.denoise import BetweenSteps, StepWatch, denoise, step_seconds
from pipelines.failures import first_line, is_out_of_memory
from pipelines.feed_forward import sliced_feed_forward
from pipelines.fitting import JobMemory
from pipelines.frames import Frames
from pipelines.loading import LoadedPipeline
from pipelines.manifests import environment_of
from pipelines.memory import release_memory
from pipelines.mp4 import Mp4Writer
from pipelines.output_norm import sliced_output_norm
from pipelines.previewing import Previewer
from pipelines.split_guidance import split_guidance
from pipelines.stages import StageRecorder
from pipelines.text import EncodedText, encode_text


@dataclass(frozen=True)
class Made:
    """Frames, and all that is to be told of how they were made."""

    frames: Frames
    manifest: Manifest
    decode: DecodeReport
    steps: StepSeconds | None
    memory: MemoryReport
    compute: ComputeReport
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
        self._memory = JobMemory(loaded, params, emit, self._warnings.append)
        self._computing = Computing(loaded, params)
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

    def run(self, video: Mp4Writer) -> Made:
        """Every stage up to the frames, which ``video`` gets as they are decoded.

        Whatever happens, the pipeline is left as it was loaded.
        """
        loaded, flag = self._loaded, self._flag
        flag.check()
        points = loaded.family.cancel_modules(loaded.pipe)
        if loaded.parallel:  # in the middle of a step, other ranks would wait for this one
            of_transformers = {module for part in loaded.transformers for module in part.modules()}
            points = [point for point in points if point not in of_transformers]
        with (
            _torch_set_up(loaded.device),
            _restored(loaded),
            swapped(loaded, self._params) as attention,
            checked_inside(points, loaded.device, flag),
        ):
            self._memory.begin()
            resume = self._keeper.find() if self._keeper else None
            if resume is not None and resume.step == self._params.num_inference_steps:
                latents, report, seconds = resume.latents, resume.attention, list[float]()
                self._warnings.extend(resume.text_warnings)
            else:
                latents, report, seconds = self._denoised(attention, resume)
            loaded.placement.stop_encoding_ahead()
            manifest = Manifest.of(self._params, report, environment_of(loaded), self._memory.report)

            def begin() -> Take:
                video.begin(manifest.model_dump_json())
                return video.add

            with self._stages.stage("vae_decode"):
                frames, decode_report = decode(
                    loaded, self._params, latents, flag.check, self._memory.first_rung, begin
                )
            self._previewer.learn(latents, frames)
        return Made(
            frames=frames,
            manifest=manifest,
            decode=decode_report,
            steps=step_seconds(seconds),
            memory=self._memory.report,
            compute=self._computing.report(),
            resumed_from_step=resume.step if resume else None,
            warnings=tuple(self._warnings),
        )

    def _denoised(
        self,
        attention: SwapHandle,
        resume: Checkpoint | None,
        watcher: BetweenSteps = lambda step, latents: None,
    ) -> tuple[torch.Tensor, AttentionReport, list[float]]:
        """Latents, what attention ran, and the seconds of each step; ``watcher`` is called between steps."""
        loaded, params = self._loaded, self._params
        with self._stages.stage("text_encode"):
            text = encode_text(loaded, params, while_waiting=self._flag.check)
        self._warnings.extend(text.warnings)

        def report() -> AttentionReport:
            ran = attention_report(attention, resume.attention if resume else None)
            return ran.model_copy(update={"parallel": parallel_report(loaded, params, attention)})

        def between_steps(step: int, latents: torch.Tensor) -> None:
            watcher(step, latents)
            self._previewer.show(step, latents)
            self._save(step, latents, report(), text)

        with self._stages.stage("denoise"):
            self._memory.look_again()
            watch = self._watch(attention, between_steps)
            with _mirrored(loaded, params, text, resume):
                latents = self._denoise_within_memory(text, watch, resume)
            self._stages.note_other_ranks(loaded.ranks.peaks if loaded.ranks else ())
            self._warnings.extend(self._computing.warnings(resume.step if resume else 0))
            self._save(params.num_inference_steps, latents, report(), text)
        return latents, report(), watch.seconds

    def warm_up(self) -> None:
        """A denoise for nothing: what compiles in a first pass has compiled then."""
        self.watched(lambda step, latents: None)

    def watched(self, watcher: BetweenSteps) -> tuple[AttentionReport, list[float]]:
        """A denoise, and a watcher called between its steps: what attention ran, and seconds of steps."""
        loaded = self._loaded
        with _torch_set_up(loaded.device), _restored(loaded), swapped(loaded, self._params) as attention:
            self._memory.begin()
            _, report, seconds = self._denoised(attention, None, watcher)
        return report, seconds

    @property
    def memory(self) -> MemoryReport:
        """How the job was fitted into the device's memory."""
        return self._memory.report

    @property
    def compute(self) -> ComputeReport:
        """How the transformers were computed."""
        return self._computing.report()

    def follow(self, start: Callable[[], tuple[EncodedText, Checkpoint | None]]) -> None:
        """The denoise of a rank that follows rank 0, from what that has encoded and read."""
        loaded, group = self._loaded, self._loaded.parallel
        if group is None:
            raise RuntimeError("there is no rank to follow")
        with contextlib.ExitStack() as stack:
            with group.agreed():
                stack.enter_context(_torch_set_up(loaded.device))
                self._memory.begin()
                stack.enter_context(_restored(loaded))
                attention = stack.enter_context(swapped(loaded, self._params))
                text, resume = start()
            self._denoise_within_memory(text, self._watch(attention), resume)

    def _watch(
        self, attention: SwapHandle, between_steps: BetweenSteps = lambda step, latents: None
    ) -> StepWatch:
        group = self._loaded.parallel
        return StepWatch(
            self._loaded.device,
            self._params,
            attention,
            self._flag,
            self._emit,
            between_steps,
            contextlib.nullcontext if group is None else group.agreed,
        )

    def _denoise_within_memory(
        self, text: EncodedText, watch: StepWatch, resume: Checkpoint | None
    ) -> torch.Tensor:
        """Latents. A first step that runs out of memory is tried again at lower offload levels."""
        loaded = self._loaded
        while True:
            try:
                chunks = self._memory.report.feed_forward_chunks
                with (
                    loaded.placement.denoising(),
                    sliced_feed_forward(loaded.transformers, chunks),
                    sliced_output_norm(loaded.transformers),
                    _guidance_on_halves(loaded, self._params),
                    self._computing.within(text),
                ):
                    return denoise(loaded, self._params, text, watch, resume)
            except (RuntimeError, MemoryError) as error:
                may_retry = not watch.seconds and self._memory.can_lower and loaded.parallel is None
                if not may_retry or not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            # The error, and the tensors that it holds, are gone here.
            loaded.family.forget(loaded.pipe)
            gc.collect()
            release_memory(loaded.device)
            self._memory.lower(reason)

    def _save(self, step: int, latents: torch.Tensor, attention: AttentionReport, text: EncodedText) -> None:
        if self._keeper and self._keeper.is_due(step):
            self._keeper.save(step, latents, self._loaded.pipe.scheduler, attention, text.warnings)


@contextlib.contextmanager
def _torch_set_up(device: torch.device) -> Iterator[None]:
    """What torch keeps per thread: no gradients, and the device that kernels are launched on."""
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


def _mirrored(
    loaded: LoadedPipeline, params: JobParameters, text: EncodedText, resume: Checkpoint | None
) -> contextlib.AbstractContextManager[None]:
    """Within the block, the other ranks denoise the same job, if there are any."""
    if loaded.ranks is None or loaded.parallel is None:
        return contextlib.nullcontext()
    return loaded.ranks.mirrored(loaded.parallel, params, text, resume)


def _guidance_on_halves(
    loaded: LoadedPipeline, params: JobParameters
) -> contextlib.AbstractContextManager[None]:
    partners = loaded.parallel.partners(params) if loaded.parallel else None
    return contextlib.nullcontext() if partners is None else split_guidance(loaded.transformers, partners)


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
