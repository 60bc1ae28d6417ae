"""The supervisor process: claims jobs for one worker process, and deals with that worker's death.

Knows: the job table, the data folder and the worker's pipe. Does not know: torch, HTTP.
It is one loop in one thread: wait for a message, a death or a deadline; act; write to the table.
"""

import sqlite3
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from configs.model_preset import ModelPreset
from configs.settings import Settings
from server import logs
from server.backoff import Backoff
from server.claims import Claim, ClaimLostError, ClaimTable
from server.database import Database
from server.files import DataFolder
from server.job import JobError
from server.jobs import JobTable
from server.lock import FolderLock
from server.parent_death import ignore_stop_signals
from server.protocol import Alive, ApiMessage, Drain, ModelLoaded, ModelLoadFailed, WorkerMessage
from server.running_job import RunningJob
from server.worker_handle import WorkerHandle
from server.worker_process import WorkerStart
from server.worker_reporter import WorkerReporter

POLL_SECONDS = 1.0
LOAD_TRIES = 3
LONGEST_BACKOFF_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class SupervisorStart:
    """What a supervisor process is started with."""

    settings: Settings
    preset: ModelPreset
    lock: FolderLock


def run_supervisor(start: SupervisorStart, api: "Connection[None, ApiMessage]") -> None:
    """Entry point of the process. Returns when drained, or when the API process is gone."""
    ignore_stop_signals()
    logs.configure(start.settings, "supervisor")
    try:
        Supervisor(start, api).run()
    except sqlite3.OperationalError as error:  # a full disk; the API process starts another one later
        logs.get_logger().error("database_error", message=str(error))
        raise SystemExit(1) from error


class Supervisor:
    """One worker slot."""

    def __init__(self, start: SupervisorStart, api: "Connection[None, ApiMessage]") -> None:
        self._files = DataFolder(start.settings.data_dir)
        database = Database(self._files.database)
        self._jobs = JobTable(database)
        self._claims = ClaimTable(database)
        self._reporter = WorkerReporter(database, start.preset.name)
        self._model = start.preset.name
        self._worker_start = WorkerStart(start.settings, start.preset, start.lock)
        self._api = api
        self._api_is_gone = False
        self._drain_until: float | None = None
        self._worker: WorkerHandle | None = None
        self._backoff = Backoff(LONGEST_BACKOFF_SECONDS)
        self._load_error: str | None = None
        self._running: RunningJob | None = None
        self._log = logs.get_logger()

    def run(self) -> None:
        """Work until drained or orphaned; after that no job is in progress and no worker is left."""
        self._recover()
        try:
            self._loop()
        finally:
            if self._worker is not None:
                self._worker.stop()
        if self._running is not None:
            self._running.give_back()
        self._reporter.stopped()

    def _loop(self) -> None:
        while not self._is_done():
            self._act()
            if self._api in wait(self._sources(), self._seconds_to_wait()):
                self._listen_to_api()
            self._listen_to_worker()

    def _recover(self) -> None:
        # The lock says that nobody else works here: what is in progress was left by a killed server.
        for job in self._jobs.running():
            self._log.warning("job_orphaned", job=job.id, attempt=job.attempt)
            with suppress(ClaimLostError):  # deleted just now
                self._claims.lose(Claim(job.id, job.attempt), "the server was killed")
        for path in self._files.remove_unknown(self._jobs.completed_attempts()):
            self._log.info("file_removed", path=str(path))
        for model, counts in self._jobs.counts().items():
            if model != self._model and counts.queued:
                self._log.warning("jobs_wait_for_other_model", model=model, queued=counts.queued)

    def _is_done(self) -> bool:
        if self._api_is_gone:
            return True
        if self._drain_until is None:
            return False
        return self._running is None or time.monotonic() >= self._drain_until

    def _sources(self) -> list["Connection[Any, Any] | int"]:
        return [self._api, *(self._worker.sources() if self._worker else [])]

    def _seconds_to_wait(self) -> float:
        deadlines = [time.monotonic() + POLL_SECONDS]
        if self._worker is None:
            deadlines.append(self._backoff.next_try_at)
        if self._drain_until is not None:
            deadlines.append(self._drain_until)
        return max(0.0, min(deadlines) - time.monotonic())

    def _act(self) -> None:
        self._reporter.beat()
        if self._worker is None and time.monotonic() >= self._backoff.next_try_at:
            self._worker = WorkerHandle(self._worker_start)
            self._reporter.started(self._worker.pid)
        if self._running is not None:
            self._running.check()
        elif self._load_error is not None:
            self._fail_queue(self._load_error)
        elif self._worker is not None and self._reporter.state == "ready" and self._drain_until is None:
            self._run_next(self._worker)

    def _run_next(self, worker: WorkerHandle) -> None:
        job = self._claims.claim(self._model)
        if job is None:
            return
        running = RunningJob(job, worker, self._claims, self._files)
        running.start()
        self._running = None if running.has_ended else running

    def _fail_queue(self, reason: str) -> None:
        while job := self._claims.claim(self._model):
            self._log.warning("job_failed", job=job.id, code="model_load_failed", message=reason)
            error = JobError("model_load_failed", reason, retryable=True)
            with suppress(ClaimLostError):  # deleted just now
                self._claims.fail(Claim(job.id, job.attempt), error)

    def _listen_to_api(self) -> None:
        try:
            message = self._api.recv()
        except (EOFError, OSError):
            self._log.error("api_process_gone")
            self._api_is_gone = True
            return
        if isinstance(message, Drain):
            self._drain_until = time.monotonic() + message.seconds

    def _listen_to_worker(self) -> None:
        if self._worker is None:
            return
        is_dead = not self._worker.is_alive()  # asked first: what it said before its death is then all there
        for message in self._worker.messages():
            self._handle(message)
        if is_dead:
            self._bury(self._worker)

    def _handle(self, message: WorkerMessage) -> None:
        if isinstance(message, ModelLoaded):
            self._load_error = None
            self._log.info("model_loaded", model=self._model, seconds=round(message.seconds, 3))
            self._reporter.loaded(message)
        elif isinstance(message, ModelLoadFailed):
            self._load_failed(message.message, retryable=message.retryable)
        elif self._running is not None and not isinstance(message, Alive):
            self._running.handle(message)
            if self._running.has_ended:
                self._running = None
                self._backoff.succeeded()

    def _load_failed(self, reason: str, *, retryable: bool) -> None:
        self._log.error("model_load_failed", model=self._model, reason=reason)
        self._reporter.load_failed(reason)
        if not retryable or self._backoff.failures + 1 >= LOAD_TRIES:
            self._load_error = reason

    def _bury(self, worker: WorkerHandle) -> None:
        cause = worker.cause_of_death()
        worker.kill()
        self._worker = None
        if self._reporter.state in {"loading", "restarting"}:
            self._load_failed(f"the worker process ended while loading the model: {cause}", retryable=True)
        elif self._reporter.state == "ready":
            self._reporter.died(cause)
        retry_seconds = self._backoff.failed()
        self._log.error("worker_died", cause=cause, retry_seconds=retry_seconds)
        if self._running is not None:
            self._running.worker_died(cause)
            self._running = None
