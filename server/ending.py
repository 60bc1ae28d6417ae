"""What the transaction that ends a job writes besides the job's row.

Knows: how long a job is kept, and who is told of its end. Does not know: which statement ended it.
"""

from server import webhook_table
from server.database import Connection
from server.job import Job
from server.observations import JOBS_TOTAL, count


def expires_at(now: float, retention_seconds: float | None) -> float | None:
    """When a job that ends now is removed; None: never."""
    return None if retention_seconds is None else now + retention_seconds


def record_end(connection: Connection, job: Job) -> None:
    """Count the job, and leave its webhook to be delivered."""
    count(connection, JOBS_TOTAL, job.model, job.status)
    webhook_table.enqueue(connection, job)
