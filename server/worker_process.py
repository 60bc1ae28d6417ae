"""The worker process: torch, one warm model, one job at a time.

Knows: the pipe to the supervisor and the pipelines package. Does not know: the job table, the queue, HTTP.
Its main thread runs jobs; a second thread reads commands, so that a cancel, and the end of the supervisor,
are known in the middle of a step.
"""

import os
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from configs.job import JobCancelledError, JobEvent, JobFailedError, JobFinished
from configs.model_preset import ModelPreset
from configs.settings import Settings
from server import logs
from server.claims import Claim
from server.job import JobError
from server.lock import FolderLock
from server.parent_death import die_with_parent, ignore_stop_signals
from server.protocol import (
    CancelJob,
    JobFailed,
    JobProgressed,
    JobStopped,
    ModelLoaded,
    ModelLoadFailed,
    RunJob,
    WorkerCommand,
    WorkerMessage,
)

# For a job to stop and its memory to be freed in order, once the supervisor is gone.
EXIT_GRACE_SECONDS = 4.0

if TYPE_CHECKING:
    from pipelines import LoadedPipeline


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What a worker process is started with. It shares the lock: while it lives, the folder is in use."""

    settings: Settings
    preset: ModelPreset
    lock: FolderLock


def run_worker(start: WorkerStart, pipe: "Connection[WorkerMessage, WorkerCommand]") -> None:
    """Entry point of the process. Returns when the supervisor has ended or the device is of no more use."""
    ignore_stop_signals()
    die_with_parent()
    logs.configure(start.settings, "worker")
    link = SupervisorLink(pipe)
    link.start()
    loaded = _load(start, link)
    if loaded is None:
        return
    load_seconds = loaded.load_seconds
    while job := link.next_job():
        if not _run(loaded, job, link, load_seconds):
            return
        load_seconds = 0.0


class SupervisorLink:
    """The worker's end of the pipe. Jobs wait in a queue; a cancel is noted as it comes."""

    def __init__(self, pipe: "Connection[WorkerMessage, WorkerCommand]") -> None:
        self._pipe = pipe
        self._jobs: queue.Queue[RunJob | None] = queue.Queue()
        self._cancelled: Claim | None = None
        self._is_cut = False

    def start(self) -> None:
        """Start reading, in a thread that does not keep the process alive."""
        threading.Thread(target=self._read, name="supervisor-link", daemon=True).start()

    def send(self, message: WorkerMessage) -> None:
        """Tell the supervisor; when it is gone nobody needs to know."""
        with suppress(OSError):
            self._pipe.send(message)

    def next_job(self) -> RunJob | None:
        """Wait for a job; None when there will be none."""
        return self._jobs.get()

    def is_cancelled(self, claim: Claim) -> bool:
        """Whether this attempt is to stop, by request or because the supervisor is gone."""
        return self._is_cut or self._cancelled == claim

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                command = self._pipe.recv()
                if isinstance(command, CancelJob):
                    self._cancelled = command.claim
                elif isinstance(command, RunJob):
                    self._jobs.put(command)
        self._is_cut = True
        self._jobs.put(None)
        time.sleep(EXIT_GRACE_SECONDS)
        os._exit(1)


def _load(start: WorkerStart, link: SupervisorLink) -> "LoadedPipeline | None":
    try:
        from pipelines import load_pipeline

        loaded = load_pipeline(start.preset, device=start.settings.device, dtype=start.settings.dtype)
    except JobFailedError as error:
        link.send(ModelLoadFailed(error.message, error.retryable))
        return None
    except Exception as error:
        logs.get_logger().exception("model_load_error")
        link.send(ModelLoadFailed(f"{type(error).__name__}: {error}", retryable=False))
        return None
    dtype = str(loaded.dtype).removeprefix("torch.")
    link.send(ModelLoaded(loaded.load_seconds, str(loaded.device), dtype))
    return loaded


def _run(loaded: "LoadedPipeline", job: RunJob, link: SupervisorLink, load_seconds: float) -> bool:
    """Run one job and report how it ends. Returns whether the device can take another one.

    ``load_seconds`` is the model's load time where this job is the first to use it, else 0.
    """
    from pipelines import run_job

    claim = job.claim
    try:
        for event in run_job(
            loaded, job.parameters, job.paths, is_cancelled=lambda: link.is_cancelled(claim)
        ):
            link.send(JobProgressed(claim, _with_load(event, load_seconds)))
    except JobCancelledError:
        link.send(JobStopped(claim))
    except JobFailedError as error:
        link.send(JobFailed(claim, JobError(error.code, error.message, error.retryable)))
        return error.code != "internal" or _device_works()
    return True


def _with_load(event: JobEvent, seconds: float) -> JobEvent:
    if not isinstance(event, JobFinished):
        return event
    metrics = event.result.metrics.model_copy(update={"load_seconds": seconds})
    return JobFinished(event.result.model_copy(update={"metrics": metrics}))


def _device_works() -> bool:
    # After some errors (an illegal address, an assertion in a kernel) every later call fails too.
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
