"""The job table as the HTTP side sees it: submit, look up, list, cancel, delete, expire.

Knows: statuses, owners, the queue and its limits. Does not know: HTTP, files, or who runs the jobs
(server/claims.py). Other people's jobs, and jobs that have expired, are as good as absent.
"""

import json
import re
from dataclasses import dataclass
from typing import Literal

from server import webhook_table
from server.database import Connection, Database, Values, read_statements
from server.ending import expires_at, record_end
from server.job import JOB_ID_PATTERN, Job, JobStatus, NewJob, new_job_id, shape_key
from server.observations import JOBS_TOTAL, count

_SQL = read_statements("jobs.sql")


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """Where a queued job stands among those for the same workers: 1 is next.

    ``seconds`` is what it will take itself, if known. ``gpus`` is what those workers have; None: any number.
    """

    position: int
    seconds: float | None
    priority: int = 0
    gpus: int | None = None


@dataclass(frozen=True, slots=True)
class WaitingJobs:
    """Queued jobs that wait for the same workers, and the age of the oldest."""

    model: str
    gpus: int | None
    count: int
    oldest_age_seconds: float


@dataclass(frozen=True, slots=True)
class ShapeTiming:
    """Measured seconds of one denoise step, and of everything else in a job of that shape."""

    step_seconds: float
    other_seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredShape(ShapeTiming):
    """What a shape that has run costs. ``passes`` through the transformer per step; ``density`` is the
    attended share of token pairs over all calls; ``peak_memory_bytes`` is the newest job's."""

    shape: str
    tokens: int
    passes: int
    density: float
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Most jobs of one model that may wait, and most of one owner that may wait or run; None: any number."""

    max_queued: int | None = None
    max_of_owner: int | None = None


NO_LIMITS = QueueLimits()


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """Queued and running jobs of one model; ``oldest_age_seconds`` is that of the oldest queued job."""

    queued: int = 0
    running: int = 0
    oldest_age_seconds: float | None = None


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


class QueueFullError(Exception):
    """So many jobs wait that no further one is taken."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class QuotaExceededError(Exception):
    """So many jobs of this owner wait or run that no further one is taken."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.limit = limit


class JobTable:
    """Jobs, by id. Every method is one transaction; when it returns, the change is on disk.

    An owner of None is that of a server without API keys: it sees the jobs that nobody owns, and no key does.
    """

    def __init__(
        self, database: Database, limits: QueueLimits = NO_LIMITS, retention_seconds: float | None = None
    ) -> None:
        self._database = database
        self._limits = limits
        self._retention_seconds = retention_seconds

    def submit(self, new: NewJob) -> Submission:
        """Write a queued job, or find the one that its owner submitted with the same idempotency key.

        Raises:
            IdempotencyConflictError: the key was used for another request.
            QueueFullError, QuotaExceededError: no further job is taken now.
        """
        with self._database.write() as connection:
            connection.take_turns("submit")  # so that limits, ids and idempotency keys hold exactly
            values = _values(new, connection.now())
            known = _known(connection, values)
            if known is None:
                self._check_limits(connection, new)
                return Submission(_insert(connection, values | {"gpus": self.gpus}), is_new=True)
        return Submission(_same_request(known, new.request_sha256), is_new=False)

    def submitted(self, owner: str | None, key: str, request_sha256: str) -> Job | None:
        """The job that the owner submitted with that idempotency key. Raises IdempotencyConflictError."""
        with self._database.read() as connection:
            row = connection.one(_SQL["get_by_idempotency_key"], {"idempotency_key": _stored_key(owner, key)})
            now = connection.now()
        if row is None or (row["expires_at"] is not None and row["expires_at"] <= now):
            return None
        return _same_request(Job.from_row(row), request_sha256)

    def _check_limits(self, connection: Connection, new: NewJob) -> None:
        limits = self._limits
        if limits.max_of_owner is not None and new.owner is not None:
            row = connection.one(_SQL["count_unfinished"], {"owner": new.owner})
            if row is not None and row["count"] >= limits.max_of_owner:
                raise QuotaExceededError(limits.max_of_owner)
        if limits.max_queued is not None:
            row = connection.one(_SQL["count_queued"], {"model": new.parameters.model})
            if row is not None and row["count"] >= limits.max_queued:
                raise QueueFullError(limits.max_queued)

    def get(self, job_id: str, owner: str | None = None) -> Job | None:
        """The owner's job, or None."""
        return self._one("get", job_id, owner)

    def find(self, job_id: str) -> Job | None:
        """The job, whoever owns it: for the server's own work, never for a client's request."""
        return self._one("find", job_id)

    def page(
        self,
        owner: str | None = None,
        *,
        after: str | None,
        limit: int,
        order: Literal["asc", "desc"],
        status: JobStatus | None,
    ) -> list[Job]:
        """Up to ``limit`` jobs of the owner beyond the id ``after`` (which may be deleted meanwhile)."""
        statement = _SQL["list_newest_first" if order == "desc" else "list_oldest_first"]
        values = {"owner": owner, "after": after, "limit": limit, "status": status}
        with self._database.read() as connection:
            rows = connection.all(statement, values | {"now": connection.now()})
        return [Job.from_row(row) for row in rows]

    def queue(self, model: str) -> dict[str, QueuePlace]:
        """Place of every queued job of a model, whoever owns it, by job id: higher priority first, then age.

        Jobs for other numbers of GPUs are in each other's way nowhere, and have places of their own.

        There is no aging: jobs of a low priority wait as long as higher ones keep coming.
        """
        with self._database.read() as connection:
            rows = connection.all(_SQL["queue"], {"model": model})
        return {
            row["id"]: QueuePlace(row["position"], row["seconds"], row["priority"], row["gpus"])
            for row in rows
        }

    def waiting(self) -> list[WaitingJobs]:
        """Queued jobs of every model, by the workers that they wait for."""
        with self._database.read() as connection:
            rows, now = connection.all(_SQL["waiting"]), connection.now()
        return [
            WaitingJobs(row["model"], row["gpus"], row["count"], max(0.0, now - row["oldest"]))
            for row in rows
        ]

    @property
    def gpus(self) -> int | None:
        """How many a worker has that takes a job submitted here; None: any worker of the model does."""
        return self._database.gpus

    def running(self, worker: str | None = None) -> list[Job]:
        """Jobs in progress: all, or those that one worker slot holds."""
        with self._database.read() as connection:
            return [Job.from_row(row) for row in connection.all(_SQL["running"], {"worker": worker})]

    def unfinished(self, owner: str) -> list[Job]:
        """The owner's jobs that wait or run."""
        with self._database.read() as connection:
            return [Job.from_row(row) for row in connection.all(_SQL["unfinished"], {"owner": owner})]

    def timing(self, shape: str) -> ShapeTiming | None:
        """What jobs of this shape took, if one has completed."""
        with self._database.read() as connection:
            row = connection.one(_SQL["timing"], {"shape": shape})
        return ShapeTiming(**row) if row else None

    def measured_shapes(self, model: str) -> list[MeasuredShape]:
        """Every shape of a model that has run, by its tokens."""
        with self._database.read() as connection:
            return [MeasuredShape(**row) for row in connection.all(_SQL["measured_shapes"], {"model": model})]

    def counts(self) -> dict[str, QueueCounts]:
        """Queued and running jobs by model; models without any are left out."""
        with self._database.read() as connection:
            rows = connection.all(_SQL["counts"])
            now = connection.now()
        found: dict[str, QueueCounts] = {}
        for row in rows:
            known = found.get(row["model"], QueueCounts())
            found[row["model"]] = (
                QueueCounts(row["count"], known.running, max(0.0, now - row["oldest"]))
                if row["status"] == "queued"
                else QueueCounts(known.queued, row["count"], known.oldest_age_seconds)
            )
        return found

    def recent_completed(self, model: str, limit: int) -> list[Job]:
        """The newest completed jobs of a model."""
        with self._database.read() as connection:
            rows = connection.all(_SQL["recent_completed"], {"model": model, "limit": limit})
            return [Job.from_row(row) for row in rows]

    def completed_attempts(self) -> dict[str, int]:
        """The attempt whose file is the video, by id of each completed job."""
        with self._database.read() as connection:
            return {row["id"]: row["attempt"] for row in connection.all(_SQL["completed_attempts"])}

    def cancel(self, job_id: str, owner: str | None = None) -> Job | None:
        """Cancel a queued job at once, ask for the cancel of a running one; a final job stays as it is."""
        if not _is_id(job_id):
            return None
        with self._database.write() as connection:
            connection.queue.hold(job_id)
            now = connection.now()
            expiry = expires_at(now, self._retention_seconds)
            values: Values = {"id": job_id, "owner": owner, "now": now, "expires_at": expiry}
            row = connection.one(_SQL["request_cancel"], values)
            if row:
                connection.queue.announce()
            if row and row["status"] == "cancelled":
                connection.queue.remove(job_id)
                record_end(connection, Job.from_row(row))
        return Job.from_row(row) if row else self.get(job_id, owner)

    def delete(self, job_id: str, owner: str | None = None) -> Job | None:
        """Remove the row; the worker of a running job finds its claim gone. Returns what was removed."""
        if not _is_id(job_id):
            return None
        with self._database.write() as connection:
            connection.queue.hold(job_id)
            values = {"id": job_id, "owner": owner, "now": connection.now()}
            row = connection.one(_SQL["get"], values)
            if row is None:
                return None
            connection.queue.remove(job_id)
            row = connection.one(_SQL["delete"], values)
            if row is None:
                return None
            job = Job.from_row(row)
            webhook_table.drop_of_job(connection, job_id)
            if not job.is_final:
                connection.queue.announce()
                count(connection, JOBS_TOTAL, job.model, "cancelled")
        return job

    def expired(self, now: float | None = None) -> list[str]:
        """Ids of the jobs that are to be removed; ``now`` is the database's clock unless given."""
        with self._database.read() as connection:
            rows = connection.all(_SQL["expired"], {"now": connection.now() if now is None else now})
        return [row["id"] for row in rows]

    def delete_expired(self, now: float | None = None) -> list[str]:
        """Remove the rows of those jobs and return their ids, whose files are then nobody's."""
        with self._database.write() as connection:
            connection.take_turns("expire")
            rows = connection.all(_SQL["delete_expired"], {"now": connection.now() if now is None else now})
            webhook_table.drop_without_job(connection)
        return [row["id"] for row in rows]

    def _one(self, statement: str, job_id: str, owner: str | None = None) -> Job | None:
        if not _is_id(job_id):
            return None
        with self._database.read() as connection:
            row = connection.one(_SQL[statement], {"id": job_id, "owner": owner, "now": connection.now()})
        return Job.from_row(row) if row else None


def _is_id(text: str) -> bool:
    return re.fullmatch(JOB_ID_PATTERN, text) is not None  # others are not asked for: PostgreSQL refuses some


def _insert(connection: Connection, values: dict[str, str | float | None]) -> Job:
    newest = connection.one(_SQL["newest_id"])
    job_id = new_job_id(newest["id"] if newest else None)
    row = connection.one(_SQL["insert"], values | {"id": job_id})
    assert row is not None
    job = Job.from_row(row)
    connection.queue.put(job.id, job.model, job.priority, job.gpus)
    return job


def _values(new: NewJob, now: float) -> dict[str, str | float | None]:
    asked, key = new.attention_asked, new.idempotency_key
    return {
        "model": new.parameters.model,
        "parameters": new.parameters.model_dump_json(),
        "attention_asked": asked.model_dump_json(exclude_none=True) if asked else None,
        "metadata": json.dumps(new.metadata),
        "idempotency_key": None if key is None else _stored_key(new.owner, key),
        "request_sha256": new.request_sha256,
        "shape": shape_key(new.parameters),
        "total_steps": new.parameters.num_inference_steps,
        "priority": new.priority,
        "owner": new.owner,
        "deadline_seconds": new.deadline_seconds,
        "webhook_url": new.webhook_url,
        "warnings": json.dumps(new.warnings),
        "now": now,
    }


def _stored_key(owner: str | None, key: str) -> str:
    return f"{owner or ''}:{key}"


def _same_request(known: Job, request_sha256: str) -> Job:
    if known.request_sha256 != request_sha256:
        raise IdempotencyConflictError(known.id)
    return known


def _known(connection: Connection, values: dict[str, str | float | None]) -> Job | None:
    """The job that was submitted before with the same idempotency key."""
    if values["idempotency_key"] is None:
        return None
    connection.run(_SQL["free_idempotency_key"], values)
    row = connection.one(_SQL["get_by_idempotency_key"], values)
    return Job.from_row(row) if row else None
