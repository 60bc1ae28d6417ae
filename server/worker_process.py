"""The worker process: torch, one warm model, one job at a time.

Knows: the pipe to the supervisor and the pipelines package. Does not know: the job table, the queue, HTTP.
Its main thread runs jobs; a second thread reads commands, so a cancel arrives in the middle of a step and
the death of the supervisor ends the process at once.
"""

import os
import queue
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from configs.job import JobCancelledError, JobFailedError
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

if TYPE_CHECKING:
    from pipelines import LoadedPipeline


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """What a worker process is started with. It shares the lock: while it lives, the folder is in use."""

    settings: Settings
    preset: ModelPreset
    lock: FolderLock


def run_worker(start: WorkerStart, pipe: "Connection[WorkerMessage, WorkerCommand]") -> None:
    """Entry point of the process. Returns, or exits, when the model cannot be used any more."""
    ignore_stop_signals()
    die_with_parent()
    logs.configure(start.settings, "worker")
    inbox = Inbox(pipe)
    inbox.start()
    loaded = _load(start, pipe)
    if loaded is None:
        return
    device_works = True
    while device_works:
        device_works = _run(loaded, inbox.next_job(), inbox, pipe)


class Inbox:
    """Reads commands as they come: jobs to run, and the one to cancel."""

    def __init__(self, pipe: "Connection[WorkerMessage, WorkerCommand]") -> None:
        self._pipe = pipe
        self._jobs: queue.Queue[RunJob] = queue.Queue()
        self._cancelled: Claim | None = None

    def start(self) -> None:
        """Start reading, in a thread that does not keep the process alive."""
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def next_job(self) -> RunJob:
        """Wait for a job."""
        return self._jobs.get()

    def is_cancelled(self, claim: Claim) -> bool:
        """Whether this attempt is to stop."""
        return self._cancelled == claim

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                command = self._pipe.recv()
                if isinstance(command, CancelJob):
                    self._cancelled = command.claim
                else:
                    self._jobs.put(command)
        os._exit(1)  # the supervisor is gone: nobody waits for this work


def _load(start: WorkerStart, pipe: "Connection[WorkerMessage, WorkerCommand]") -> "LoadedPipeline | None":
    log = logs.get_logger()
    began = time.perf_counter()
    try:
        from pipelines import load_pipeline

        loaded = load_pipeline(start.preset, device=start.settings.device, dtype=start.settings.dtype)
    except JobFailedError as error:
        pipe.send(ModelLoadFailed(error.message, error.retryable))
        return None
    except Exception as error:
        log.exception("model_load_error")
        pipe.send(ModelLoadFailed(f"{type(error).__name__}: {error}", retryable=False))
        return None
    seconds = time.perf_counter() - began
    pipe.send(ModelLoaded(seconds, str(loaded.device), str(loaded.dtype).removeprefix("torch.")))
    return loaded


def _run(
    loaded: "LoadedPipeline",
    job: RunJob,
    inbox: Inbox,
    pipe: "Connection[WorkerMessage, WorkerCommand]",
) -> bool:
    """Run one job and report how it ends. Returns whether the device can take another one."""
    from pipelines import run_job

    claim = job.claim
    log = logs.get_logger().bind(job=claim.job_id, attempt=claim.attempt)
    try:
        events = run_job(
            loaded, job.parameters, job.output_path, is_cancelled=lambda: inbox.is_cancelled(claim)
        )
        for event in events:
            pipe.send(JobProgressed(claim, event))
    except JobCancelledError:
        pipe.send(JobStopped(claim))
    except JobFailedError as error:
        pipe.send(JobFailed(claim, JobError(error.code, error.message, error.retryable)))
        return error.code != "internal" or _device_works()
    except Exception as error:
        log.exception("job_error")
        message = f"{type(error).__name__}: {error}"
        pipe.send(JobFailed(claim, JobError("internal", message, retryable=False)))
        return _device_works()
    return True


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
