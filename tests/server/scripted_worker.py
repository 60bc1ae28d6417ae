"""A worker process without a model: it does what the words of each job's prompt say, over the real pipe.

For faults that a healthy pipeline cannot be brought to: jobs that do not stop, devices that break, workers
that load for ever. It is started like the real one (tests replace ``run_worker`` by ``run_script``).
"""

import os
import signal
import threading
import time
from multiprocessing.connection import Connection

from configs.job import (
    CheckpointSaved,
    DeviceReleased,
    JobEvent,
    JobFinished,
    PreviewReady,
    StageFinished,
    StageStarted,
    StepFinished,
)
from server.job import JobError
from server.parent_death import die_with_parent, ignore_stop_signals
from server.protocol import (
    DeviceBroken,
    JobFailed,
    JobProgressed,
    JobStopped,
    ModelLoaded,
    ModelLoadFailed,
    RunJob,
    WorkerCommand,
    WorkerMessage,
)
from server.worker_link import SupervisorLink
from server.worker_process import WorkerStart
from tests.server.samples import result_of

JPEG = b"\xff\xd8 a picture"
BIG_BYTES = 20 * 1024 * 1024
MEMORY_BYTES = 64 * 2**30
PAUSE_SECONDS = 0.05
LOAD_FAILS = "SCRIPTED_WORKER_LOAD_FAILS"


def run_script(start: WorkerStart, pipe: "Connection[WorkerMessage, WorkerCommand]") -> None:
    """Entry point of the process. Prompts of jobs to come are noted in ``ahead.txt`` in the data folder."""
    ignore_stop_signals()
    die_with_parent()
    link = SupervisorLink(pipe)
    link.start()
    if LOAD_FAILS in os.environ:
        link.send(ModelLoadFailed("there are no weights", retryable=False))
        return
    link.report_memory(lambda: {"cpu": 1234})
    link.send(ModelLoaded(0.5, "cpu", "float32", MEMORY_BYTES))
    threading.Thread(target=_note_ahead, args=(start, link), daemon=True).start()
    threads = []
    while job := link.next_job():
        threads.append(threading.Thread(target=_Script(job, link).run, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()


def _note_ahead(start: WorkerStart, link: SupervisorLink) -> None:
    while True:
        prompt = link.next_ahead().prompt
        with (start.settings.data_dir / "ahead.txt").open("a") as file:
            file.write(f"{prompt}\n")


class _Script:
    """One job. A word ``until:NAME`` waits for a file of that name in the folder above the videos."""

    def __init__(self, job: RunJob, link: SupervisorLink) -> None:
        self._job = job
        self._link = link
        self._content = b"whole"

    def run(self) -> None:
        """Say and do every word; a job that is not ended by one of them waits for its cancel."""
        for word in self._job.parameters.prompt.split():
            if word.startswith("until:"):
                self._wait_for(word.removeprefix("until:"))
            else:
                getattr(self, f"_{word}")()
        while not self._link.is_cancelled(self._job.claim):
            time.sleep(0.01)
        self._link.send(JobStopped(self._job.claim))

    def _wait_for(self, name: str) -> None:
        while not (self._job.paths.video.parents[2] / name).exists():
            if self._link.is_cancelled(self._job.claim):
                return
            time.sleep(0.01)

    def _denoise(self) -> None:
        self._tell(StageStarted("denoise"))

    def _step(self) -> None:
        self._tell(StepFinished(1, self._job.parameters.num_inference_steps, 0.1))

    def _pause(self) -> None:
        time.sleep(PAUSE_SECONDS)

    def _checkpoint(self) -> None:
        assert self._job.paths.checkpoint is not None
        self._job.paths.checkpoint.write_bytes(b"latents")
        self._tell(CheckpointSaved(1, 7))

    def _preview(self) -> None:
        self._tell(PreviewReady(1, JPEG))

    def _release(self) -> None:
        self._tell(DeviceReleased())

    def _finish(self) -> None:
        self._tell(StageFinished("denoise", 0.1, 1))
        for path in (self._job.paths.video, self._job.paths.thumbnail):
            assert path is not None
            path.write_bytes(self._content)
        self._tell(JobFinished(result_of(self._content)))
        raise SystemExit

    def _big(self) -> None:
        self._content = os.urandom(BIG_BYTES)

    def _resumed(self) -> None:
        path = self._job.paths.checkpoint
        assert path is not None
        self._content = b"after " + (path.read_bytes() if path.exists() else b"nothing")

    def _stubborn(self) -> None:
        while True:
            time.sleep(60)

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _break(self) -> None:
        self._link.send(DeviceBroken("an illegal memory access"))
        self._link.no_more_jobs()
        self._link.send(JobFailed(self._job.claim, JobError("internal", "an illegal memory access", False)))
        raise SystemExit

    def _tell(self, event: JobEvent) -> None:
        self._link.send(JobProgressed(self._job.claim, event))
