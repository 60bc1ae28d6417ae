"""The job table as a worker's supervisor sees it: claim a job, report its progress, end it.

Knows: the fence. Every write names the job's attempt, and ClaimLostError is raised when the row is no
longer this attempt's. Does not know: processes, tensors, HTTP.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from configs.job import AttentionReport, JobResult, Stage
from server import observations
from server.clip_cost import attended_share, transformer_passes
from server.database import Connection, Database, Row, Values, read_statements
from server.ending import expires_at, record_end
from server.identity import last_away
from server.job import Job, JobError
from server.observations import count, observe, set_gauge
from server.workers import HEARTBEAT_SECONDS, LOCAL_SLOT, LOST_AFTER_SECONDS

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
    """Claims of one worker slot. Every method is one transaction; when it returns, the change is on disk."""

    def __init__(
        self, database: Database, retention_seconds: float | None = None, worker: str = LOCAL_SLOT
    ) -> None:
        self._database = database
        self._retention_seconds = retention_seconds
        self._worker = worker

    def claim(self, model: str) -> Job | None:
        """Take the queued job of a model whose turn it is (highest priority, then oldest), or None."""
        with self._database.write() as connection:
            while job_id := connection.queue.take(model, self._worker):
                now = connection.now()
                row = connection.one(_SQL["claim"], {"id": job_id, "now": now, "worker": self._worker})
                if row is None:  # somebody changed the queue's tables by hand
                    connection.queue.remove(job_id)
                    continue
                if row["attempt"] == 1:
                    observe(connection, observations.QUEUE_WAIT, now - row["created_at"], row["model"])
                return Job.from_row(row)
        return None

    def peek(self, model: str) -> Job | None:
        """The job that ``claim`` would take now; nothing is taken, and another one may be taken later."""
        with self._database.read() as connection:
            row = connection.one(_SQL["peek"], {"model": model, "gpus": self._database.gpus})
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
        """A stage ended: only its duration is recorded, once. Raises ClaimLostError."""
        with self._database.write() as connection:
            row = _fenced(connection, "held", claim)
            if row["finished_stage"] == stage:  # the answer to the commit had got lost
                return
            _fenced(connection, "finish_stage", claim, stage=stage)
            observe(connection, observations.STAGE_DURATION, seconds, row["model"], stage)

    def finish_step(self, claim: Claim, step: int, seconds: float, progress: int) -> Job:
        """A denoise step ended; told twice, it counts once. Returns the job, for its cancel flag.

        Raises ClaimLostError.
        """
        with self._database.write() as connection:
            known = _fenced(connection, "held", claim)
            if known["step"] >= step:  # the answer to the commit had got lost
                return Job.from_row(known)
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
        with self._held_row(claim) as connection:
            job = self._end(connection, "complete", claim, result=result.model_dump_json())
            _observe_result(connection, job, result)

    def fail(self, claim: Claim, error: JobError) -> None:
        """The job ended without a video. Raises ClaimLostError."""
        with self._held_row(claim) as connection:
            self._end(connection, "fail", claim, error=error.to_json())

    def finish_cancel(self, claim: Claim) -> None:
        """The worker has stopped as asked. Raises ClaimLostError."""
        with self._held_row(claim) as connection:
            self._end(connection, "finish_cancel", claim)

    def requeue(self, claim: Claim) -> None:
        """Give the job back through no fault of its own; its checkpoint stays. Raises ClaimLostError."""
        with self._held_row(claim) as connection:
            self._give_back(connection, claim, loss=0, reason="")

    def lose(self, claim: Claim, reason: str) -> None:
        """The worker died: queue the job again, fail it the second time. Raises ClaimLostError."""
        with self._held_row(claim) as connection:
            self._give_back(connection, claim, loss=1, reason=reason)

    def reap(self, lost_after_seconds: float = LOST_AFTER_SECONDS) -> list[Claim]:
        """Lose the claims of every worker that gave no sign of life for so long, by the database's clock.

        One that fell silent while the database was away may have been drained, and could not say so: its jobs
        are queued again without a loss.
        Several reapers may run at once: each claim is lost by one of them, and not at all if its worker came
        back meanwhile. Returns those that this call has lost.
        """
        with self._database.read() as connection:
            found = _lost(connection, lost_after_seconds, None)
        lost = [claim for claim in found if self._reap(claim, lost_after_seconds)]
        with self._database.write() as connection:
            connection.queue.tidy(lost_after_seconds)
        return lost

    def _reap(self, claim: Claim, lost_after_seconds: float) -> bool:
        with suppress(ClaimLostError), self._held_row(claim) as connection:
            last_sign = _lost(connection, lost_after_seconds, claim.job_id)
            if claim in last_sign:
                reason = f"its supervisor gave no sign of life for {lost_after_seconds:g} seconds"
                loss = 0 if _fell_silent_with(connection, last_sign[claim]) else 1
                self._give_back(connection, claim, loss=loss, reason=reason)
                return True
        return False

    @contextmanager
    def _held_row(self, claim: Claim) -> Iterator[Connection]:
        """A transaction that may end the claim or give it back."""
        with self._database.write() as connection:
            connection.queue.hold(claim.job_id)
            yield connection

    def _give_back(self, connection: Connection, claim: Claim, *, loss: int, reason: str) -> None:
        row = _fenced(connection, "held", claim)
        if row["cancel_requested"]:
            self._end(connection, "finish_cancel", claim)
        elif row["losses"] + loss >= MAX_LOSSES:
            message = f"the worker process died {MAX_LOSSES} times while running this job; last: {reason}"
            self._end(connection, "fail", claim, error=JobError("worker_lost", message, True).to_json())
        else:
            _fenced(connection, "requeue", claim, loss=loss)
            connection.queue.put_back(claim.job_id, row["model"], row["priority"], row["gpus"])

    def _end(self, connection: Connection, statement: str, claim: Claim, **values: str) -> Job:
        now = connection.now()
        end = {"now": now, "expires_at": expires_at(now, self._retention_seconds)}
        row = _fenced(connection, statement, claim, **end, **values)
        job = Job.from_row(row)
        connection.queue.remove(job.id)
        record_end(connection, job)
        seconds = row["completed_at"] - row["started_at"]
        observe(connection, observations.JOB_DURATION, seconds, job.model, job.status)
        return job


def _fenced(connection: Connection, statement: str, claim: Claim, **values: str | float | None) -> Row:
    row = connection.one(_SQL[statement], {**values, "id": claim.job_id, "attempt": claim.attempt})
    if row is None:
        raise ClaimLostError(claim)
    return row


def _lost(connection: Connection, lost_after_seconds: float, job_id: str | None) -> dict[Claim, float | None]:
    """By claim, when its worker last gave a sign of life; None: its row is gone."""
    values = {"since": connection.now() - lost_after_seconds, "id": job_id}
    rows = connection.all(_SQL["lost"], values)
    return {Claim(row["id"], row["attempt"]): row["heartbeat_at"] for row in rows}


def _fell_silent_with(connection: Connection, last_sign_at: float | None) -> bool:
    """Whether the worker was there when the database's last outage began, and not at its end."""
    away = last_away(connection)
    if away is None or last_sign_at is None:
        return False
    return away.start - 2 * HEARTBEAT_SECONDS <= last_sign_at < away.end


def _count_calls(connection: Connection, model: str, attention: AttentionReport) -> None:
    """The calls of a job, as its report has them."""
    of_job = connection, observations.ATTENTION_CALLS, model, attention.backend
    if attention.sparse_calls:
        precision = attention.precision or "full"
        count(*of_job, "sparse", "", attention.implementation, precision, times=attention.sparse_calls)
    for reason, calls in attention.dense_reasons.items():
        count(*of_job, "dense", reason, attention.dense_implementation, "full", times=calls)


def _observe_result(connection: Connection, job: Job, result: JobResult) -> None:
    metrics, attention = result.metrics, result.attention
    set_gauge(connection, observations.PEAK_MEMORY, metrics.peak_memory_bytes, job.model, result.device)
    set_gauge(connection, observations.DENSITY, attention.density, job.model, attention.backend)
    _count_calls(connection, job.model, attention)
    # The worker's own durations, not the row's times: those jump with the clock.
    seconds = metrics.total_seconds
    clip_seconds = job.parameters.num_frames / job.parameters.fps
    if seconds > 0:
        set_gauge(connection, observations.REALTIME, clip_seconds / seconds, job.model)
    if job.steps_run == 0:
        return  # resumed after the last step
    timing: Values = {
        "shape": job.shape,
        "step_seconds": job.denoise_seconds / job.steps_run,
        "other_seconds": max(0.0, seconds - job.denoise_seconds),
        "model": job.model,
        "tokens": attention.tokens,
        "passes": transformer_passes(job.parameters),
        "density": attended_share(attention),
        "peak_memory_bytes": metrics.peak_memory_bytes,
    }
    connection.run(_SQL["record_timing"], timing)
