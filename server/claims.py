"""The job table as a worker's supervisor sees it: claim a job, report its progress, end it.

Knows: the fence. Every write names the job's attempt, and ClaimLostError is raised when the row is no
longer this attempt's. Does not know: processes, tensors, HTTP.
"""

import sqlite3
import time
from dataclasses import dataclass

from configs.job import JobResult, Stage
from server import observations
from server.clip_cost import attended_share, transformer_passes
from server.database import Database, read_statements
from server.ending import expires_at, record_end
from server.job import Job, JobError
from server.observations import observe, set_gauge

_SQL = read_statements("jobs.sql")

MAX_LOSSES = 2


class ClaimLostError(Exception):
    """The job was deleted, or another attempt has it; what this attempt made must be thrown away."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One attempt at one job."""

    job_id: str
    attempt: int


class ClaimTable:
    """Claims on jobs. Every method is one transaction; when it returns, the change is on disk."""

    def __init__(self, database: Database, retention_seconds: float | None = None) -> None:
        self._database = database
        self._retention_seconds = retention_seconds

    def claim(self, model: str) -> Job | None:
        """Take the queued job of a model whose turn it is (highest priority, then oldest), or None."""
        now = time.time()
        with self._database.write() as connection:
            row = connection.execute(_SQL["claim"], {"model": model, "now": now}).fetchone()
            if row is None:
                return None
            if row["attempt"] == 1:
                observe(connection, observations.QUEUE_WAIT, now - row["created_at"], row["model"])
        return Job.from_row(row)

    def peek(self, model: str) -> Job | None:
        """The job that ``claim`` would take now; nothing is taken, and another one may be taken later."""
        with self._database.read() as connection:
            row = connection.execute(_SQL["peek"], {"model": model}).fetchone()
        return Job.from_row(row) if row else None

    def held(self, claim: Claim) -> Job:
        """The job as it stands; ``cancel_requested`` may have been set. Raises ClaimLostError."""
        with self._database.read() as connection:
            return Job.from_row(_fenced(connection, "held", claim))

    def enter_stage(self, claim: Claim, stage: Stage, progress: int) -> None:
        """A stage began. Raises ClaimLostError."""
        with self._database.write() as connection:
            _fenced(connection, "enter_stage", claim, stage=stage, progress=progress)

    def finish_stage(self, claim: Claim, stage: Stage, seconds: float) -> None:
        """A stage ended: only its duration is recorded. Raises ClaimLostError."""
        with self._database.write() as connection:
            row = _fenced(connection, "held", claim)
            observe(connection, observations.STAGE_DURATION, seconds, row["model"], stage)

    def finish_step(self, claim: Claim, step: int, seconds: float, progress: int) -> Job:
        """A denoise step ended. Returns the job, for its cancel flag. Raises ClaimLostError."""
        with self._database.write() as connection:
            row = _fenced(connection, "finish_step", claim, step=step, seconds=seconds, progress=progress)
            job = Job.from_row(row)
            backend = job.parameters.attention.backend
            observe(connection, observations.STEP_DURATION, seconds, job.model, backend)
        return job

    def set_checkpoint(self, claim: Claim, step: int) -> None:
        """The state after ``step`` lies on disk; 0: nothing usable does. Raises ClaimLostError."""
        with self._database.write() as connection:
            _fenced(connection, "set_checkpoint", claim, step=step)

    def set_preview(self, claim: Claim, step: int) -> None:
        """The preview picture of ``step`` lies in its place. Raises ClaimLostError."""
        with self._database.write() as connection:
            _fenced(connection, "set_preview", claim, step=step)

    def complete(self, claim: Claim, result: JobResult) -> None:
        """The file lies in its place. Raises ClaimLostError."""
        with self._database.write() as connection:
            job = self._end(connection, "complete", claim, result=result.model_dump_json())
            _observe_result(connection, job, result)

    def fail(self, claim: Claim, error: JobError) -> None:
        """The job ended without a video. Raises ClaimLostError."""
        with self._database.write() as connection:
            self._end(connection, "fail", claim, error=error.to_json())

    def finish_cancel(self, claim: Claim) -> None:
        """The worker has stopped as asked. Raises ClaimLostError."""
        with self._database.write() as connection:
            self._end(connection, "finish_cancel", claim)

    def requeue(self, claim: Claim) -> None:
        """Give the job back through no fault of its own; its checkpoint stays. Raises ClaimLostError."""
        with self._database.write() as connection:
            self._give_back(connection, claim, loss=0, reason="")

    def lose(self, claim: Claim, reason: str) -> None:
        """The worker died: queue the job again, fail it the second time. Raises ClaimLostError."""
        with self._database.write() as connection:
            self._give_back(connection, claim, loss=1, reason=reason)

    def _give_back(self, connection: sqlite3.Connection, claim: Claim, *, loss: int, reason: str) -> None:
        row = _fenced(connection, "held", claim)
        if row["cancel_requested"]:
            self._end(connection, "finish_cancel", claim)
        elif row["losses"] + loss >= MAX_LOSSES:
            message = f"the worker process died {MAX_LOSSES} times while running this job; last: {reason}"
            self._end(connection, "fail", claim, error=JobError("worker_lost", message, True).to_json())
        else:
            _fenced(connection, "requeue", claim, loss=loss)

    def _end(self, connection: sqlite3.Connection, statement: str, claim: Claim, **values: str) -> Job:
        now = time.time()
        end = {"now": now, "expires_at": expires_at(now, self._retention_seconds)}
        row = _fenced(connection, statement, claim, **end, **values)
        job = Job.from_row(row)
        record_end(connection, job)
        seconds = row["completed_at"] - row["started_at"]
        observe(connection, observations.JOB_DURATION, seconds, job.model, job.status)
        return job


def _fenced(
    connection: sqlite3.Connection, statement: str, claim: Claim, **values: str | float | None
) -> sqlite3.Row:
    fence = {"id": claim.job_id, "attempt": claim.attempt}
    row: sqlite3.Row | None = connection.execute(_SQL[statement], values | fence).fetchone()
    if row is None:
        raise ClaimLostError(claim)
    return row


def _observe_result(connection: sqlite3.Connection, job: Job, result: JobResult) -> None:
    metrics, attention = result.metrics, result.attention
    set_gauge(connection, observations.PEAK_MEMORY, metrics.peak_memory_bytes, job.model, result.device)
    set_gauge(connection, observations.DENSITY, attention.density, job.model, attention.backend)
    # The worker's own durations, not the row's times: those jump with the clock.
    seconds = metrics.total_seconds
    clip_seconds = job.parameters.num_frames / job.parameters.fps
    if seconds > 0:
        set_gauge(connection, observations.REALTIME, clip_seconds / seconds, job.model)
    if job.steps_run == 0:
        return  # resumed after the last step
    timing = {
        "shape": job.shape,
        "step_seconds": job.denoise_seconds / job.steps_run,
        "other_seconds": max(0.0, seconds - job.denoise_seconds),
        "model": job.model,
        "tokens": attention.tokens,
        "passes": transformer_passes(job.parameters),
        "density": attended_share(attention),
        "peak_memory_bytes": metrics.peak_memory_bytes,
    }
    connection.execute(_SQL["record_timing"], timing)
