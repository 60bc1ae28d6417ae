"""What somebody must do from time to time, and anybody may: expire jobs, take claims from lost workers, say
which jobs nobody takes.

Knows: what is due, and that others do the same at the same time: each job is removed or lost once, by one of
them. Does not know: who runs it, a supervisor or an API process without one.
"""

import time
from typing import Protocol

from server import identity, logs
from server.claims import ClaimTable
from server.database import Database
from server.jobs import JobTable
from server.staffing import Staff
from server.workers import LOST_AFTER_SECONDS, WorkerTable

EXPIRY_SECONDS = 1.0
REAP_SECONDS = 5.0
FORGET_SECONDS = 3600.0


class RemovesFiles(Protocol):
    """A supervisor's files, or what an API process removes later."""

    def remove(self, job_id: str) -> None:
        """Remove everything of a job. Does not wait for a network."""
        ...


class Housekeeping:
    """Every method of one thread. With SQLite nobody is lost: the one supervisor is the API's child."""

    def __init__(self, database: Database, files: RemovesFiles, retention_seconds: float | None) -> None:
        self._database = database
        self._jobs = JobTable(database)
        self._claims = ClaimTable(database, retention_seconds)
        self._workers = WorkerTable(database)
        self._files = files
        self._reaps = database.is_remote
        self._expire_at = 0.0
        self._see_at = 0.0
        self._reap_at = 0.0
        self._ran_at = float("-inf")
        self._unserved: set[tuple[str, int | None]] = set()
        self._log = logs.get_logger()

    def run(self) -> None:
        """Do what is due. Raises DatabaseError.

        After a gap, a start or an outage of the database, nobody is lost at once: the heartbeats of others
        may be old for the same reason.
        """
        if time.monotonic() > self._ran_at + REAP_SECONDS:
            self._reap_at = time.monotonic() + LOST_AFTER_SECONDS
        if time.monotonic() >= self._expire_at:
            self.expire()
        if self._reaps and time.monotonic() >= self._see_at:
            identity.see(self._database)
            self._see_at = time.monotonic() + identity.SEE_SECONDS
        if self._reaps and time.monotonic() >= self._reap_at:
            self._reap()
            self._tell_of_unserved()
            self._reap_at = time.monotonic() + REAP_SECONDS
        self._ran_at = time.monotonic()

    def expire(self) -> None:
        """Remove the jobs that have expired, and their files."""
        if self._jobs.expired():
            for job_id in self._jobs.delete_expired():
                self._files.remove(job_id)
                self._log.info("job_expired", job=job_id)
        self._expire_at = time.monotonic() + EXPIRY_SECONDS

    def _reap(self) -> None:
        for claim in self._claims.reap():
            self._log.warning("job_reaped", job=claim.job_id, attempt=claim.attempt)
            job = self._jobs.find(claim.job_id)
            if job is None or job.is_final:
                self._files.remove(claim.job_id)
        self._workers.forget_silent(FORGET_SECONDS)

    def _tell_of_unserved(self) -> None:
        """Once for each kind of jobs, and again when a worker had been there meanwhile."""
        unserved = Staff(self._workers.all()).unserved(self._jobs.waiting())
        for found in unserved:
            kind = (found.waiting.model, found.waiting.gpus)
            if kind not in self._unserved:
                self._log.warning(
                    "jobs_wait_for_no_worker",
                    model=found.waiting.model,
                    gpus=found.waiting.gpus,
                    queued=found.waiting.count,
                    message=found.reason,
                )
        self._unserved = {(found.waiting.model, found.waiting.gpus) for found in unserved}
