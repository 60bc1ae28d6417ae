"""Runs one job on a loaded pipeline, as an iterator of events.

Knows: the order of the stages and what must be undone after them. Does not know: queues, clients, storage.
The work runs in a thread of its own, so that events come out while the next step computes.
"""

import contextlib
import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import torch

from configs.geometry import GeometryError
from configs.job import (
    AttentionReport,
    JobCancelledError,
    JobEvent,
    JobFailedError,
    JobFinished,
    JobParameters,
    JobPaths,
    JobResult,
)
from configs.model_preset import ModelPreset
from pipelines.attending import swapped
from pipelines.cancel import CancelFlag, checked_inside
from pipelines.denoise import StepWatch, denoise, step_seconds
from pipelines.failures import ended_by
from pipelines.frames import Frames, require_clip, require_finite, to_frames
from pipelines.loading import LoadedPipeline
from pipelines.memory import release_memory
from pipelines.mp4 import write_mp4
from pipelines.stages import StageRecorder
from pipelines.text import encode_text

Outcome = JobFinished | JobCancelledError | JobFailedError


def run_job(
    loaded: LoadedPipeline,
    params: JobParameters,
    paths: JobPaths,
    *,
    is_cancelled: Callable[[], bool],
    preview_seconds: float = 0.0,
) -> Iterator[JobEvent]:
    """Make the clip and write its files to ``paths``; the last event is ``JobFinished``.

    ``is_cancelled`` is called often, and from another thread. Closing the iterator cancels the job and waits
    until its memory is free. One job at a time on one pipeline.

    Raises:
        JobCancelledError: nothing is left of the job, on the device or beside its files.
        JobFailedError: the same, with the reason. The pipeline is ready for the next job in both cases.
    """
    require_possible(params, loaded.preset)
    flag = CancelFlag(is_cancelled)
    events: SimpleQueue[JobEvent | Outcome] = SimpleQueue()
    thread = threading.Thread(
        target=lambda: events.put(_outcome(loaded, params, paths, flag, events.put)),
        name="reelwright-job",
    )
    with _alone_on(loaded):
        thread.start()
        try:
            while not isinstance(event := events.get(), Outcome):
                yield event
        finally:
            flag.set()
            thread.join()
    if not isinstance(event, JobFinished):
        raise event
    yield event


def require_possible(params: JobParameters, preset: ModelPreset) -> None:
    """Raise JobFailedError("invalid_input") for what the pipeline would round, or fail on half-way."""
    geometry = preset.geometry
    try:
        geometry.check_side("width", params.width)
        geometry.check_side("height", params.height)
        geometry.check_frames(params.num_frames)
    except GeometryError as error:
        raise JobFailedError("invalid_input", str(error)) from error
    for field in ("num_inference_steps", "fps"):
        value = getattr(params, field)
        if value < 1:
            raise JobFailedError("invalid_input", f"{field} {value} is below 1")


@contextlib.contextmanager
def _alone_on(loaded: LoadedPipeline) -> Iterator[None]:
    if not loaded.busy.acquire(blocking=False):
        raise JobFailedError("internal", f"model {loaded.preset.name} is busy with another job")
    try:
        yield
    finally:
        loaded.busy.release()


def _outcome(
    loaded: LoadedPipeline,
    params: JobParameters,
    paths: JobPaths,
    flag: CancelFlag,
    emit: Callable[[JobEvent], None],
) -> Outcome:
    stages = StageRecorder(loaded.device, emit)

    def attempt(work: Callable[[], Outcome]) -> Outcome:
        try:
            return work()
        except BaseException as error:  # whatever the thread does not pass on would hang the caller
            return ended_by(error, stages.current, _shape(params, loaded))

    outcome = attempt(lambda: JobFinished(_run(loaded, params, paths, flag, emit, stages)))
    return attempt(lambda: _with_memory_released(outcome, loaded.device))


def _with_memory_released(outcome: Outcome, device: torch.device) -> Outcome:
    if not isinstance(outcome, JobFinished):
        # The frames that the exception went through still hold each other, and tensors.
        gc.collect()
    release_memory(device)
    return outcome


def _run(
    loaded: LoadedPipeline,
    params: JobParameters,
    paths: JobPaths,
    flag: CancelFlag,
    emit: Callable[[JobEvent], None],
    stages: StageRecorder,
) -> JobResult:
    if not paths.video.parent.is_dir():
        raise JobFailedError("internal", f"the output folder {paths.video.parent} does not exist")
    flag.check()
    points = loaded.family.cancel_modules(loaded.pipe)
    with (
        _torch_set_up(loaded.device),
        _restored(loaded),
        swapped(loaded, params) as attention,
        checked_inside(points, loaded.device, flag),
    ):
        with stages.stage("text_encode"):
            text = encode_text(loaded, params)
        with stages.stage("denoise"):
            watch = StepWatch(loaded.device, params, attention, flag, emit)
            latents = denoise(loaded, params, text, watch)
        with stages.stage("vae_decode"):
            frames = _decode(loaded, params, latents)
        with stages.stage("encode_mp4"):
            file = write_mp4(frames, paths.video, params.fps, before_frame=flag.check)
    return JobResult(
        file=file,
        metrics=stages.metrics(step_seconds(watch.seconds)),
        attention=AttentionReport.model_validate(dataclasses.asdict(attention.report())),
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        warnings=text.warnings,
    )


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
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
        loaded.family.forget(pipe)
        pipe.maybe_free_model_hooks()


def _decode(loaded: LoadedPipeline, params: JobParameters, latents: torch.Tensor) -> Frames:
    pictures = loaded.family.decode_latents(loaded.pipe, latents)
    require_finite(pictures, "decoded pictures")
    frames = to_frames(pictures)
    require_clip(frames, params.num_frames, params.height, params.width)
    return frames


def _shape(params: JobParameters, loaded: LoadedPipeline) -> str:
    return f"{params.num_frames} frames of {params.width}x{params.height} on {loaded.device}"
