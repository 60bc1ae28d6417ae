"""The supervisor process: claims jobs for one worker process, and deals with that worker's death.

Knows: the job table, the jobs' files and the worker's pipe. Does not know: torch, HTTP.
It is one loop in one thread: wait for a message, a death or a deadline; act; write to the table. Waits are
measured on the monotonic clock: nothing happens because somebody sets the wall clock, but that jobs expire.
"""

import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from configs.model_preset import ModelPreset
from configs.settings import Settings
from server import logs
from server.backoff import Backoff
from server.claims import Claim, ClaimLostError, ClaimTable
from server.database import DatabaseUnavailableError, open_database
from server.drain_note import read_note, remove_note, write_note
from server.files import DataFolder
from server.housekeeping import Housekeeping
from server.inbox import Inbox, WorkerDied
from server.job import JobError
from server.jobs import JobTable
from server.lock import FolderLock
from server.outage import Outage
from server.parent_death import ignore_stop_signals
from server.process_end import run_to_end
from server.protocol import (
    Alive,
    ApiMessage,
    DeviceBroken,
    Drain,
    EncodeAhead,
    JobFailed,
    JobProgressed,
    JobStopped,
    ModelLoaded,
    ModelLoadFailed,
    WorkerMessage,
)
from server.queue_news import QueueNews
from server.running_job import JobStores, RunningJob
from server.slot import Slot
from server.staffing import Staff
from server.storage.opening import open_job_files
from server.worker_handle import WorkerHandle
from server.worker_process import WorkerStart
from server.worker_reporter import WorkerReporter
from server.workers import LOCAL_SLOT, WorkerTable, files_of

POLL_SECONDS = 1.0
LOAD_TRIES = 3
LONGEST_BACKOFF_SECONDS = 60.0
# No other worker was up for so long: longer than a restart takes.
ALONE_SECONDS = 60.0
# Longer than a restart of the database takes; whoever stops this process may end the wait at any time.
HAND_BACK_SECONDS = 300.0
ORPHAN_SECONDS = 5.0
DATABASE_ERROR_EXIT = 75  # EX_TEMPFAIL of sysexits.h
# Imports and weight readers may hold Python's lock for long on a slow disk, so signs of life are late.
LOAD_SILENCE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class SupervisorStart:
    """What a supervisor process is started with."""

    settings: Settings
    preset: ModelPreset
    lock: FolderLock
    slot: str = LOCAL_SLOT
    follows_database_error: bool = False
    """Whether the one before ended because the table could not be written: no job's fault."""


def run_supervisor(start: SupervisorStart, api: "Connection[None, ApiMessage]") -> NoReturn:
    """All of the process, which ends when drained, or when the API process is gone."""
    ignore_stop_signals()
    logs.configure(start.settings, "supervisor")
    run_to_end(lambda: supervise(start, api))


def supervise(start: SupervisorStart, api: "Connection[None, ApiMessage]") -> None:
    """Be the supervisor, in this process. Returns when drained, or when ``api``'s other end is closed."""
    with logs.crash_as_line():
        try:
            Supervisor(start, api).run()
        except DatabaseUnavailableError as error:  # a full disk; somebody starts another one later
            logs.get_logger().error("database_error", message=str(error))
            raise SystemExit(DATABASE_ERROR_EXIT) from error


class Supervisor:
    """One worker slot."""

    def __init__(self, start: SupervisorStart, api: "Connection[None, ApiMessage]") -> None:
        settings = start.settings
        self._folder = folder = DataFolder(settings.data_dir)
        database = open_database(settings)
        self._jobs = JobTable(database)
        self._files = open_job_files(settings, folder, self._jobs, database)
        self._claims = ClaimTable(database, settings.retention_seconds, start.slot)
        self._reporter = WorkerReporter(
            database, start.preset.name, start.slot, settings.gpus, files_of(settings.storage_url)
        )
        self._workers = WorkerTable(database)
        self._gpus = settings.gpus
        self._housekeeping = Housekeeping(database, self._files, settings.retention_seconds)
        self._news = QueueNews(database)
        self._outage = Outage()
        self._is_shared = database.is_remote
        self._slot_name = start.slot
        self._may_have_strays = False
        self._alone_since: float | None = None
        self._inbox = Inbox()
        self._model = start.preset.name
        self._worker_start = WorkerStart(settings, start.preset, start.lock)
        self._longest_silence_seconds = settings.worker_timeout_seconds
        self._api = api
        self._api_is_gone = False
        self._drain_until: float | None = None
        self._worker: WorkerHandle | None = None
        self._broken: str | None = None
        self._backoff = Backoff(LONGEST_BACKOFF_SECONDS)
        self._load_error: str | None = None
        self._slot = Slot(JobStores(self._claims, self._jobs, self._files))
        self._has_named_next = False
        self._follows_database_error = start.follows_database_error
        self._log = logs.get_logger()

    def run(self) -> None:
        """Work until drained or orphaned; after that no worker is left.

        In progress are then only jobs whose finished files are not all in the object store; the next start
        goes on with these.

        A job that is not done when the drain time is over goes on from its last checkpoint in the next
        server. None is saved for the drain: that would take as long as a step, which the drain time is for.
        """
        self._recover()
        try:
            self._loop()
        finally:
            if self._worker is not None:
                self._worker.stop()
        self._hand_back()
        self._news.close()
        self._files.close()

    def _hand_back(self) -> None:
        """Write down what is left to be said, and queue the jobs again that are not done.

        While a shared database is away this waits for it, so that the end does not look like a host's death.
        In the meantime, and for good if that is in vain, a note tells the next start of the slot.
        """
        patience = ORPHAN_SECONDS if self._api_is_gone else HAND_BACK_SECONDS
        give_up_at = time.monotonic() + patience
        while True:
            try:
                self._read_inbox()
                self._return_strays()
                self._slot.give_back()
                self._reporter.stopped()
            except DatabaseUnavailableError as error:
                self._outage.failed(error)
                write_note(self._folder, self._slot.claims)
                if not self._is_shared or not self._waits_on(give_up_at):
                    raise
            else:
                self._outage.succeeded()
                remove_note(self._folder)
                return

    def _waits_on(self, give_up_at: float) -> bool:
        """Wait a moment for the database. False: no longer, since time is over or somebody says so."""
        if self._api_is_gone:  # another server may wait for the data folder
            time.sleep(self._outage.seconds_to_retry)
        elif wait([self._api], self._outage.seconds_to_retry):
            told = self._drain_until
            self._listen_to_api()
            if self._api_is_gone or self._drain_until != told:
                return False
        return time.monotonic() < give_up_at

    def _loop(self) -> None:
        while not self._is_done():
            self._act_if_possible()
            if self._api in wait(self._sources(), self._seconds_to_wait()):
                self._listen_to_api()
            self._news.clear()
            self._listen_to_worker()
            self._inbox.extend(self._files.messages())

    def _act_if_possible(self) -> None:
        """Do what is due. While the database is away, jobs go on and what is to be written waits."""
        if not self._outage.is_due:
            return
        try:
            self._act()
        except DatabaseUnavailableError as error:
            if not self._is_shared:  # a full disk: this process ends, and its successor cleans up
                raise
            self._outage.failed(error)
            self._may_have_strays = True
        else:
            self._outage.succeeded()

    def _recover(self) -> None:
        # The lock says that nobody else is this slot: what it has in progress, a killed supervisor left.
        resumed, drained = set(), read_note(self._folder)
        for job in self._jobs.running(self._slot_name if self._is_shared else None):
            claim = Claim(job.id, job.attempt)
            if self._slot.resume(job):
                resumed.add(claim)
                continue
            self._log.warning("job_orphaned", job=job.id, attempt=job.attempt)
            with suppress(ClaimLostError):  # deleted just now
                if self._follows_database_error or claim in drained:
                    self._claims.requeue(claim)
                else:
                    self._claims.lose(claim, "the server was killed")
        remove_note(self._folder)
        self._housekeeping.expire()
        counts = self._jobs.counts()
        self._files.tidy(resumed)
        for model, found in counts.items():
            if model != self._model and found.queued and not self._is_shared:
                self._log.warning("jobs_wait_for_other_model", model=model, queued=found.queued)

    def _is_done(self) -> bool:
        if self._api_is_gone:
            return True
        if self._drain_until is None:
            return False
        is_idle = self._slot.is_empty and not self._slot.is_storing and not self._inbox
        return is_idle or time.monotonic() >= self._drain_until

    def _sources(self) -> list["Connection[Any, Any] | int"]:
        worker = self._worker.sources() if self._worker else []
        return [self._api, *worker, *self._files.sources(), *self._news.sources()]

    def _seconds_to_wait(self) -> float:
        now = time.monotonic()
        deadlines = [POLL_SECONDS, self._slot.seconds_to_deadline()]
        if self._worker is None:
            deadlines.append(self._backoff.next_try_at - now)
        # While the database is away nothing is done about these before it may be asked again.
        seconds = max(min(deadlines), self._outage.seconds_to_retry)
        if self._drain_until is not None:
            seconds = min(seconds, self._drain_until - now)
        return max(0.0, seconds)

    def _act(self) -> None:
        self._keep_worker()
        self._reporter.beat()
        self._news.open()
        self._read_inbox()
        self._return_strays()
        self._housekeeping.run()
        stuck = self._slot.check()
        if stuck is not None and self._worker is not None:
            self._bury(self._worker, "killed because the job did not stop in time", stuck)
            self._read_inbox()
        if self._load_error is not None:
            if self._is_alone():
                self._fail_queue(self._load_error)
        elif self._worker is not None and self._takes_jobs():
            self._feed(self._worker)

    def _keep_worker(self) -> None:
        if self._worker is None and time.monotonic() >= self._backoff.next_try_at:
            self._worker = WorkerHandle(self._worker_start)
            self._reporter.started(self._worker.pid)

    def _return_strays(self) -> None:
        """Queue again what this slot has claimed without knowing it: the answer to the claim got lost."""
        if not self._may_have_strays:
            return
        for job in self._jobs.running(self._slot_name):
            claim = Claim(job.id, job.attempt)
            if not self._slot.holds(claim):
                self._log.warning("job_requeued", job=job.id, attempt=job.attempt)
                with suppress(ClaimLostError):
                    self._claims.requeue(claim)
        self._may_have_strays = False

    def _takes_jobs(self) -> bool:
        may_take = self._drain_until is None and self._broken is None and not self._files.is_full
        return self._reporter.state == "ready" and may_take

    def _feed(self, worker: WorkerHandle) -> None:
        if self._slot.is_open:
            self._start_next(worker)
        elif self._slot.is_denoising and not self._has_named_next:
            job = self._claims.peek(self._model)
            if job is not None:
                worker.send(EncodeAhead(job.parameters))
                self._has_named_next = True

    def _start_next(self, worker: WorkerHandle) -> None:
        if not worker.is_alive():  # it is buried in a moment; no job is to be lost with it that it never had
            return
        if not self._slot.is_empty:
            following = self._claims.peek(self._model)
            if following is None or following.losses:  # a job that lost a worker shares the next with none
                return
        job = self._claims.claim(self._model)
        if job is None:
            return
        if job.losses and not self._slot.is_empty:  # another worker was quicker with the one that was seen
            self._claims.requeue(Claim(job.id, job.attempt))
            return
        self._has_named_next = False
        self._slot.start(job, worker)

    def _is_alone(self) -> bool:
        """Whether no other worker may run the jobs; that must last, since others are restarted too."""
        if not self._is_shared:
            return True
        now = time.monotonic()
        if self._others_may_run():
            self._alone_since = None
            return False
        self._alone_since = now if self._alone_since is None else self._alone_since
        return now >= self._alone_since + ALONE_SECONDS

    def _others_may_run(self) -> bool:
        """Whether jobs may wait for another worker, though the model does not load here."""
        taking = Staff(self._workers.all()).of(self._model, self._gpus)
        return any(worker.name != self._slot_name for worker in taking)

    def _fail_queue(self, reason: str) -> None:
        while job := self._claims.claim(self._model):
            self._log.warning("job_failed", job=job.id, code="model_load_failed", message=reason)
            error = JobError("model_load_failed", reason, retryable=True)
            with suppress(ClaimLostError):  # deleted just now
                self._claims.fail(Claim(job.id, job.attempt), error)
            self._files.remove(job.id)

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
        worker = self._worker
        if worker is None:
            return
        is_dead = not worker.is_alive()  # asked first: what it said before its death is then all there
        for message in worker.messages():
            self._take(message)
        if is_dead:
            cause = worker.cause_of_death()
            self._bury(worker, f"{cause}: {self._broken}" if self._broken else cause)
        elif self._broken is not None and self._slot.is_empty and not self._inbox:
            worker.stop()
            self._bury(worker, "replaced because its device failed")
        elif (seconds := worker.silent_seconds()) > self._silence_limit():
            self._bury(worker, f"killed because it gave no sign of life for {seconds:.0f} seconds")

    def _silence_limit(self) -> float:
        if self._reporter.state == "ready":
            return self._longest_silence_seconds
        return max(self._longest_silence_seconds, LOAD_SILENCE_SECONDS)

    def _take(self, message: WorkerMessage) -> None:
        match message:
            case Alive(memory_in_use_bytes):
                self._reporter.uses(memory_in_use_bytes)
            case ModelLoaded():
                self._load_error = self._alone_since = None
                self._log.info("model_loaded", model=self._model, seconds=round(message.seconds, 3))
                self._reporter.loaded(message)
            case ModelLoadFailed():
                self._load_failed(message.message, retryable=message.retryable)
            case DeviceBroken(reason):
                self._log.error("device_broken", reason=reason)
                self._broken = reason
            case _:
                self._inbox.add(message)

    def _read_inbox(self) -> None:
        """Write down what was said. A message stays until that is done: handled twice, if need be."""
        while self._inbox:
            match self._inbox.first:
                case WorkerDied(cause, guilty):
                    self._slot.worker_died(cause, guilty)
                case JobProgressed() | JobStopped() | JobFailed() as message:
                    if self._slot.handle(message):
                        self._backoff.succeeded()
                case message:
                    self._slot.handle_storage(message)
            self._inbox.drop_first()

    def _load_failed(self, reason: str, *, retryable: bool) -> None:
        self._log.error("model_load_failed", model=self._model, reason=reason)
        self._reporter.load_failed(reason)
        if not retryable or self._backoff.failures + 1 >= LOAD_TRIES:
            self._load_error = reason

    def _bury(self, worker: WorkerHandle, cause: str, guilty: RunningJob | None = None) -> None:
        worker.kill()
        self._worker = None
        self._broken = None
        if self._reporter.state in {"loading", "restarting"}:
            self._load_failed(f"the worker process ended while loading the model: {cause}", retryable=True)
        elif self._reporter.state == "ready":
            self._reporter.died(cause)
        retry_seconds = self._backoff.failed()
        self._log.error("worker_died", cause=cause, retry_seconds=retry_seconds)
        self._inbox.add(WorkerDied(cause, guilty))
