"""The job table as the HTTP side sees it: submit, look up, list, cancel, delete.

Knows: statuses and the queue. Does not know: HTTP, files, or who runs the jobs (server/claims.py).
"""

import json
import time
from dataclasses import dataclass
from typing import Literal

from server.database import Database, read_statements
from server.job import Job, JobStatus, NewJob, new_job_id, shape_key
from server.observations import JOBS_TOTAL, count

_SQL = read_statements("jobs.sql")


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """Where a queued job stands: 1 is next. ``seconds`` until its end from an idle worker, if known."""

    position: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class ShapeTiming:
    """Measured seconds of one denoise step, and of everything else in a job of that shape."""

    step_seconds: float
    other_seconds: float


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """Queued and running jobs of one model; ``oldest_created_at`` is that of the oldest queued job."""

    queued: int = 0
    running: int = 0
    oldest_created_at: float | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """The job of a submission; not new when its idempotency key was known."""

    job: Job
    is_new: bool


class IdempotencyConflictError(Exception):
    """The idempotency key belongs to another request's job."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id


class JobTable:
    """Jobs, by id. Every method is one transaction; when it returns, the change is on disk."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def submit(self, new: NewJob) -> Submission:
        """Write a queued job, or find the one that was written with the same idempotency key.

        Raises:
            IdempotencyConflictError: the key was used for another request.
        """
        asked = new.attention_asked
        values = {
            "id": new_job_id(),
            "model": new.parameters.model,
            "parameters": new.parameters.model_dump_json(),
            "attention_asked": asked.model_dump_json(exclude_none=True) if asked else None,
            "metadata": json.dumps(new.metadata),
            "idempotency_key": new.idempotency_key,
            "request_sha256": new.request_sha256,
            "shape": shape_key(new.parameters),
            "total_steps": new.parameters.num_inference_steps,
            "now": time.time(),
        }
        with self._database.write() as connection:
            row = connection.execute(_SQL["submit"], values).fetchone()
            if row is not None:
                return Submission(Job.from_row(row), is_new=True)
            known = Job.from_row(connection.execute(_SQL["get_by_idempotency_key"], values).fetchone())
        if known.request_sha256 != new.request_sha256:
            raise IdempotencyConflictError(known.id)
        return Submission(known, is_new=False)

    def get(self, job_id: str) -> Job | None:
        """The job, or None."""
        with self._database.read() as connection:
            row = connection.execute(_SQL["get"], {"id": job_id}).fetchone()
        return Job.from_row(row) if row else None

    def page(
        self, *, after: str | None, limit: int, order: Literal["asc", "desc"], status: JobStatus | None
    ) -> list[Job]:
        """Up to ``limit`` jobs beyond the id ``after`` (which may be deleted meanwhile)."""
        statement = _SQL["list_newest_first" if order == "desc" else "list_oldest_first"]
        values = {"after": after, "limit": limit, "status": status}
        with self._database.read() as connection:
            return [Job.from_row(row) for row in connection.execute(statement, values)]

    def queue(self, model: str) -> dict[str, QueuePlace]:
        """Place of every queued job of a model, by job id."""
        with self._database.read() as connection:
            rows = connection.execute(_SQL["queue"], {"model": model}).fetchall()
        return {
            row["id"]: QueuePlace(
                row["position"], row["seconds"] if row["measured"] == row["position"] else None
            )
            for row in rows
        }

    def running(self) -> list[Job]:
        """Jobs in progress."""
        with self._database.read() as connection:
            return [Job.from_row(row) for row in connection.execute(_SQL["running"])]

    def timing(self, shape: str) -> ShapeTiming | None:
        """What jobs of this shape took, if one has completed."""
        with self._database.read() as connection:
            row = connection.execute(_SQL["timing"], {"shape": shape}).fetchone()
        return ShapeTiming(**row) if row else None

    def counts(self) -> dict[str, QueueCounts]:
        """Queued and running jobs by model; models without any are left out."""
        with self._database.read() as connection:
            rows = connection.execute(_SQL["counts"]).fetchall()
        found: dict[str, QueueCounts] = {}
        for row in rows:
            known = found.get(row["model"], QueueCounts())
            found[row["model"]] = (
                QueueCounts(row["count"], known.running, row["oldest"])
                if row["status"] == "queued"
                else QueueCounts(known.queued, row["count"], known.oldest_created_at)
            )
        return found

    def recent_completed(self, model: str, limit: int) -> list[Job]:
        """The newest completed jobs of a model."""
        with self._database.read() as connection:
            rows = connection.execute(_SQL["recent_completed"], {"model": model, "limit": limit})
            return [Job.from_row(row) for row in rows]

    def completed_attempts(self) -> dict[str, int]:
        """The attempt whose file is the video, by id of each completed job."""
        with self._database.read() as connection:
            return {row["id"]: row["attempt"] for row in connection.execute(_SQL["completed_attempts"])}

    def cancel(self, job_id: str) -> Job | None:
        """Cancel a queued job at once, ask for the cancel of a running one; a final job stays as it is."""
        with self._database.write() as connection:
            row = connection.execute(_SQL["request_cancel"], {"id": job_id, "now": time.time()}).fetchone()
            if row and row["status"] == "cancelled":
                count(connection, JOBS_TOTAL, row["model"], "cancelled")
        return Job.from_row(row) if row else self.get(job_id)

    def delete(self, job_id: str) -> Job | None:
        """Remove the row; the worker of a running job finds its claim gone. Returns what was removed."""
        with self._database.write() as connection:
            row = connection.execute(_SQL["delete"], {"id": job_id}).fetchone()
            if row and row["status"] in {"queued", "in_progress"}:
                count(connection, JOBS_TOTAL, row["model"], "cancelled")
        return Job.from_row(row) if row else None
