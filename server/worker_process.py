"""The worker process: torch, one warm model, one job at a time on the device, or on several as rank 0.

Knows: the link to the supervisor and the pipelines package. Does not know: the job table, the queue, HTTP.
Each job has a thread: while one job denoises, the one before may still write its files, and the text of the
next one is encoded.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from configs.attention import AttentionConfig
from configs.job import (
    DeviceReleased,
    JobCancelledError,
    JobEvent,
    JobFailedError,
    JobFinished,
    MemoryPlanned,
    StageStarted,
)
from configs.model_preset import ModelPreset
from configs.settings import Settings
from server import logs
from server.job import JobError
from server.lock import FolderLock
from server.model_choice import chosen_attention
from server.parent_death import die_with_parent, ignore_stop_signals
from server.protocol import (
    DeviceBroken,
    JobFailed,
    JobMessage,
    JobProgressed,
    JobStopped,
    ModelLoaded,
    ModelLoadFailed,
    RunJob,
    WorkerCommand,
    WorkerMessage,
)
from server.torch_environment import set_up_torch_environment
from server.worker_link import SupervisorLink

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
    with logs.crash_as_line():
        link = SupervisorLink(pipe)
        link.start()
        loaded = _load(start, link)
        if loaded is None:
            return
        try:
            Worker(loaded, link, start.settings.preview_seconds).run()
        finally:
            if loaded.ranks is not None:
                loaded.ranks.close()


@dataclass(frozen=True, slots=True)
class _Follower:
    """What the process of another rank does first. It shares the folder's lock, as this one does."""

    settings: Settings
    lock: FolderLock

    def __call__(self) -> None:
        ignore_stop_signals()
        die_with_parent()
        logs.configure(self.settings, "rank")
        logs.adopt_libraries()


def _load(start: WorkerStart, link: SupervisorLink) -> "LoadedPipeline | None":
    set_up_torch_environment()
    try:
        # All that a job needs: what an installation lacks must keep the server unready, not fail every job.
        from pipelines import encode_ahead, run_job  # noqa: F401
        from pipelines.fitting import usable_bytes
        from pipelines.mp4 import check_ffmpeg
        from pipelines.ranks import load_on_ranks

        check_ffmpeg()

        logs.adopt_libraries()
        settings = start.settings
        loaded = load_on_ranks(
            start.preset,
            ranks=settings.gpus,
            device=settings.device,
            dtype=settings.dtype,
            memory=settings.memory,
            compute=settings.compute,
            on_broken=lambda reason: link.send(DeviceBroken(reason)),
            prepare=_Follower(settings, start.lock),
            silence_seconds=settings.worker_timeout_seconds,
        )
        _warm_up(loaded, chosen_attention(settings, start.preset))
    except JobFailedError as error:
        link.send(ModelLoadFailed(error.message, error.retryable))
        return None
    except Exception as error:
        logs.get_logger().exception("model_load_error")
        link.send(ModelLoadFailed(f"{type(error).__name__}: {error}", retryable=False))
        return None
    dtype = str(loaded.dtype).removeprefix("torch.")
    link.report_memory(_memory_meter(loaded))
    link.send(ModelLoaded(loaded.load_seconds, str(loaded.device), dtype, usable_bytes(loaded)))
    return loaded


def _memory_meter(loaded: "LoadedPipeline") -> Callable[[], dict[str, int]]:
    """Reads the bytes in use by device. On a CPU those of all ranks are on one."""
    from pipelines.device_memory import in_use_meter

    own = in_use_meter(loaded.device)

    def read() -> dict[str, int]:
        found = {str(loaded.device): own()}
        for device, in_use in loaded.ranks.memory_in_use() if loaded.ranks else ():
            found[device] = found.get(device, 0) + in_use
        return found

    return read


def _warm_up(loaded: "LoadedPipeline", attention: AttentionConfig) -> None:
    """Compile what is to be compiled before the first job comes, and say what jobs will run."""
    from pipelines import warm_up

    log, blocks = logs.get_logger(), loaded.blocks
    seconds = warm_up(loaded, attention)
    if blocks.have_failed:
        log.warning("blocks_run_eager", reason=blocks.eager_reason)
    else:
        log.info("blocks", compiled=blocks.are_compiled, reason=blocks.eager_reason, seconds=seconds)


class Worker:
    """Runs the jobs that come over the link, each in a thread."""

    def __init__(self, loaded: "LoadedPipeline", link: SupervisorLink, preview_seconds: float) -> None:
        self._loaded = loaded
        self._link = link
        self._preview_seconds = preview_seconds
        self._released_at: float | None = None
        self._log = logs.get_logger()

    def run(self) -> None:
        """Returns when there will be no more jobs and those there were have ended."""
        threading.Thread(target=self._encode_ahead, name="encode-ahead", daemon=True).start()
        threads: list[threading.Thread] = []
        load_seconds = self._loaded.load_seconds  # the first job waited for it
        while job := self._link.next_job():
            thread = threading.Thread(target=self._run, args=(job, load_seconds), name="job")
            thread.start()
            threads = [*(thread for thread in threads if thread.is_alive()), thread]
            load_seconds = 0.0
        for thread in threads:
            thread.join()

    def _run(self, job: RunJob, load_seconds: float) -> None:
        """Run one job and report how it ends, whatever happens: else it would be in progress for ever."""
        claim, parameters = job.claim, job.parameters
        ending: JobMessage = JobFailed(claim, JobError("internal", "the job's thread broke off", True))
        try:
            with logs.job_lines(claim.job_id, claim.attempt, parameters.prompt, parameters.negative_prompt):
                ending = self._ending(job, load_seconds)
            if isinstance(ending, JobFailed):
                self._check_device(ending.error)
        finally:
            self._link.ended(claim)
            self._link.send(ending)

    def _ending(self, job: RunJob, load_seconds: float) -> JobMessage:
        from pipelines import run_job

        claim = job.claim
        message: JobMessage = JobStopped(claim)
        try:
            for event in run_job(
                self._loaded,
                job.parameters,
                job.paths,
                is_cancelled=lambda: self._link.is_cancelled(claim),
                preview_seconds=self._preview_seconds,
            ):
                self._note(event)
                message = JobProgressed(claim, _with_load(event, load_seconds))
                if not isinstance(event, JobFinished):
                    self._link.send(message)
        except JobCancelledError:
            return JobStopped(claim)
        except JobFailedError as error:
            return JobFailed(claim, JobError(error.code, error.message, error.retryable))
        except Exception as error:
            self._log.exception("job_error")
            return JobFailed(claim, JobError("internal", f"{type(error).__name__}: {error}", retryable=True))
        return message

    def _note(self, event: JobEvent) -> None:
        match event:
            case DeviceReleased():
                self._released_at = time.monotonic()
            case StageStarted("denoise") if self._released_at is not None:
                seconds = time.monotonic() - self._released_at
                self._log.info("device_was_idle", seconds=round(seconds, 4))
            case MemoryPlanned(report):
                self._log.info("job_memory", **report.model_dump(mode="json"))

    def _encode_ahead(self) -> None:
        from pipelines.text import encode_ahead

        while True:
            parameters = self._link.next_ahead()
            try:
                encode_ahead(self._loaded, parameters)
            except Exception as error:  # the job will meet it too, and report it
                self._log.warning("encode_ahead_failed", message=f"{type(error).__name__}")

    def _check_device(self, error: JobError) -> None:
        ranks = self._loaded.ranks
        is_broken = ranks is not None and ranks.broken is not None
        if is_broken or (error.code == "internal" and not _device_works()):
            self._link.send(DeviceBroken(error.message))
            self._link.no_more_jobs()


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
