"""Runs one job on a loaded pipeline, as an iterator of events.

Knows: the two parts of a job, the one on the device and the one beside it, and what is freed in between.
Does not know: stages, queues, clients, storage. The work runs in a thread of its own, so that events come out
while the next step computes.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeVar

import torch

from configs.geometry import GeometryError
from configs.job import (
    DeviceReleased,
    JobCancelledError,
    JobEvent,
    JobFailedError,
    JobFinished,
    JobParameters,
    JobPaths,
)
from configs.model_preset import ModelPreset
from pipelines.cancel import CancelFlag
from pipelines.failures import ended_by
from pipelines.loading import LoadedPipeline
from pipelines.making import Made, Making
from pipelines.memory import release_memory
from pipelines.mp4 import Mp4Writer
from pipelines.stages import StageRecorder
from pipelines.writing import write_files

Failure = JobCancelledError | JobFailedError
Outcome = JobFinished | Failure
Result = TypeVar("Result")


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
    until its memory is free. One job at a time on one pipeline, until ``DeviceReleased``: then the next may
    start while this one writes its files. Previews come at least ``preview_seconds`` apart; 0: none.

    Raises:
        JobCancelledError: nothing is left of the job, on the device or beside its files; a checkpoint stays.
        JobFailedError: the same, with the reason. The pipeline is ready for the next job in both cases.
    """
    require_possible(params, loaded.preset)
    flag = CancelFlag(is_cancelled)
    events: SimpleQueue[JobEvent | Outcome] = SimpleQueue()
    hold = _Hold(loaded)
    job = _Job(loaded, params, paths, flag, events.put, hold, preview_seconds)
    thread = threading.Thread(target=lambda: events.put(job.run()), name="reelwright-job")
    try:
        thread.start()
        try:
            while not isinstance(event := events.get(), Outcome):
                yield event
        finally:
            flag.set()
            thread.join()
    finally:
        hold.release()
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


class _Hold:
    """A job's sole use of a pipeline, taken at once and given back once, by whichever thread."""

    def __init__(self, loaded: LoadedPipeline) -> None:
        if not loaded.busy.acquire(blocking=False):
            raise JobFailedError("internal", f"model {loaded.preset.name} is busy with another job")
        self._busy: threading.Lock | None = loaded.busy

    def release(self) -> None:
        """Let the next job in. Later calls do nothing: the lock may be that job's by then."""
        busy, self._busy = self._busy, None
        if busy is not None:
            busy.release()


class _Job:
    """The work of the job's thread."""

    def __init__(
        self,
        loaded: LoadedPipeline,
        params: JobParameters,
        paths: JobPaths,
        flag: CancelFlag,
        emit: Callable[[JobEvent], None],
        hold: _Hold,
        preview_seconds: float,
    ) -> None:
        self._loaded = loaded
        self._params = params
        self._paths = paths
        self._flag = flag
        self._emit = emit
        self._hold = hold
        self._preview_seconds = preview_seconds
        self._stages = StageRecorder(loaded.device, emit)

    def run(self) -> Outcome:
        """Both parts. Whatever the thread does not pass on would hang the caller."""
        return self._attempt(self._both_parts)

    def _both_parts(self) -> Outcome:
        params = self._params
        with Mp4Writer(self._paths.video, params.width, params.height, params.fps) as video:
            return self._one_after_the_other(video)

    def _one_after_the_other(self, video: Mp4Writer) -> Outcome:
        made = self._attempt(lambda: self._on_device(video))
        made = self._attempt(lambda: _with_memory_released(made, self._loaded.device))
        self._hold.release()
        if not isinstance(made, Made):
            return made
        self._emit(DeviceReleased())
        outcome = self._attempt(lambda: self._beside_device(made, video))
        if not isinstance(outcome, JobFinished):
            gc.collect()
        return outcome

    def _on_device(self, video: Mp4Writer) -> Made:
        folder = self._paths.video.parent
        if not folder.is_dir():
            raise JobFailedError("internal", f"the output folder {folder} does not exist")
        return Making(
            self._loaded,
            self._params,
            self._paths.checkpoint,
            self._preview_seconds,
            self._flag,
            self._emit,
            self._stages,
        ).run(video)

    def _beside_device(self, made: Made, video: Mp4Writer) -> JobFinished:
        return JobFinished(write_files(made, video, self._loaded, self._paths, self._stages, self._flag))

    def _attempt(self, work: Callable[[], Result]) -> Result | Failure:
        try:
            return work()
        except BaseException as error:
            return ended_by(error, self._stages.current, self._shape())

    def _shape(self) -> str:
        params = self._params
        return f"{params.num_frames} frames of {params.width}x{params.height} on {self._loaded.device}"


def _with_memory_released(made: Result, device: torch.device) -> Result:
    if not isinstance(made, Made):
        # The frames that the exception went through still hold each other, and tensors.
        gc.collect()
    release_memory(device)
    return made
