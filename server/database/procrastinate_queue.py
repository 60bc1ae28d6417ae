"""procrastinate as the queue of waiting jobs, inside our own transactions.

Knows: procrastinate's statements, and which of its rows belongs to which job. Does not know: what a job is.

procrastinate's worker loop is not used: it runs tasks in coroutines, and a job here runs in another process.
Its rows of ended jobs are deleted, so its tables stay as small as the queue.
"""

import hashlib
from typing import cast

import psycopg
from procrastinate import jobs, manager
from procrastinate.sql import queries
from procrastinate.sync_psycopg_connector import SyncPsycopgConnector

from server.database.interface import Row
from server.database.statements import read_statements

Raw = psycopg.Connection[Row]

QUEUE_CHANNEL = "reelwright_queue"
TASK_NAME = "reelwright.run"
# A notification's channel has at most 63 bytes; procrastinate's are "procrastinate_queue_v1#" and the queue.
LONGEST_QUEUE_NAME_BYTES = 40

_SQL = {name: statement.postgres.encode() for name, statement in read_statements("queue.sql").items()}
_MANAGER = manager.JobManager(SyncPsycopgConnector())  # never opened: every call brings its connection


def queue_name(model: str, gpus: int) -> str:
    """``model@gpus``; a long model name is shortened to the start of its SHA-256."""
    name = f"{model}@{gpus}"
    if len(name.encode()) <= LONGEST_QUEUE_NAME_BYTES:
        return name
    return f"{hashlib.sha256(model.encode()).hexdigest()[:32]}@{gpus}"


class ProcrastinateQueue:
    """The queue, in one connection's transaction. Locks are taken in the order worker, queue row, job row.

    A job waits for a worker with as many GPUs as the settings said where it was submitted.
    """

    def __init__(self, raw: Raw, gpus: int) -> None:
        self._raw = raw
        self._gpus = gpus

    def put(self, job_id: str, model: str, priority: int, gpus: int | None) -> None:
        """A row in state ``todo``. The queueing lock lets no job wait twice."""
        job = jobs.Job(
            queue=self._queue_name(model, gpus),
            priority=priority,
            lock=None,
            queueing_lock=job_id,
            task_name=TASK_NAME,
            task_kwargs={"job_id": job_id},
        )
        deferred = _MANAGER.defer_job(job, connection=self._raw)
        self._raw.execute(_SQL["link"], {"job_id": job_id, "queue_id": deferred.id})
        self.announce()

    def take(self, model: str, worker: str) -> str | None:
        """``todo`` to ``doing``; rows that somebody else is just taking are skipped."""
        values = {"queues": [self._queue_name(model, None)], "worker_id": self._worker_id(worker)}
        row = self._raw.execute(queries["fetch_job"].encode(), values).fetchone()
        return None if row is None or row["id"] is None else str(row["args"]["job_id"])

    def hold(self, job_id: str) -> None:
        """Lock the job's row of the queue."""
        self._raw.execute(_SQL["hold"], {"job_id": job_id})

    def put_back(self, job_id: str, model: str, priority: int, gpus: int | None) -> None:
        """``doing`` to ``todo``; its number in the queue, and so its place, stays."""
        row = self._raw.execute(_SQL["find"], {"job_id": job_id}).fetchone()
        if row is None or row["status"] != "doing":
            self.remove(job_id)
            self.put(job_id, model, priority, gpus)
            return
        keep = dict.fromkeys(("retry_at", "new_priority", "new_queue_name", "new_lock"))
        self._raw.execute(queries["retry_job"].encode(), {"job_id": row["id"], **keep})
        self.announce()

    def remove(self, job_id: str) -> None:
        """Delete the row in either state."""
        self._raw.execute(_SQL["remove"], {"job_id": job_id})

    def announce(self) -> None:
        """Notify the channel of the queue."""
        self._raw.execute("SELECT pg_notify(%s, '')", (QUEUE_CHANNEL,))

    def beat(self, worker: str) -> None:
        """The heartbeat that procrastinate's own tools look at."""
        self._worker_id(worker)

    def tidy(self, lost_after_seconds: float) -> None:
        """Prune procrastinate's workers; a row that somebody else deleted from its tables comes back."""
        values = {"seconds_since_heartbeat": lost_after_seconds}
        self._raw.execute(queries["prune_stalled_workers"].encode(), values)
        for row in self._raw.execute(_SQL["without_place"]).fetchall():
            self.remove(row["id"])
            self.put(row["id"], row["model"], row["priority"], row["gpus"])

    def _queue_name(self, model: str, gpus: int | None) -> str:
        """None: as many as the settings here say."""
        return queue_name(model, gpus or self._gpus)

    def _worker_id(self, worker: str) -> int:
        """procrastinate's number of the worker, which has just given a sign of life."""
        row = self._raw.execute(_SQL["beat"], {"worker": worker}).fetchone()
        if row is None:
            registered = self._raw.execute(queries["register_worker"].encode()).fetchone()
            assert registered is not None
            row = {"id": registered["worker_id"]}
            self._raw.execute(_SQL["register"], {"worker": worker, "id": row["id"]})
        return cast(int, row["id"])
