"""Webhooks that were not delivered yet: written when a job ends, removed when delivered or given up.

Knows: the webhooks table. Does not know: how a webhook is sent or signed, or when the next try is wise.
"""

import secrets
import sqlite3
import time
from dataclasses import dataclass

from server.database import Database, read_statements
from server.job import Job
from server.observations import WEBHOOKS_TOTAL, count

_SQL = read_statements("webhooks.sql")

MAX_DUE = 100


@dataclass(frozen=True, slots=True)
class Webhook:
    """One row. ``id`` is the same in every try; ``site`` is the URL's host and port; ``tries`` were in vain;
    times are seconds since 1970."""

    id: str
    job_id: str
    event: str
    url: str
    site: str
    created_at: float
    tries: int
    tried_at: float
    next_try_at: float


class WebhookTable:
    """Undelivered webhooks. Every method is one transaction.

    The methods that say what became of a webhook return False when its row is gone: its job was deleted, or
    another process was faster.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def due(self, now: float, per_site: int = MAX_DUE) -> list[Webhook]:
        """Those to be tried now, longest due first; at most MAX_DUE, and ``per_site`` of one site."""
        with self._database.read() as connection:
            values = {"now": now, "limit": MAX_DUE, "per_site": per_site}
            rows = connection.execute(_SQL["due"], values)
            return [Webhook(**row) for row in rows]

    def delivered(self, webhook_id: str) -> bool:
        """The receiver has it."""
        return self._settle("remove", "delivered", id=webhook_id)

    def failed(self, webhook_id: str, next_try_at: float) -> bool:
        """A try was in vain; there will be another one."""
        return self._settle("put_off", "failed", id=webhook_id, now=time.time(), next_try_at=next_try_at)

    def give_up(self, webhook_id: str) -> bool:
        """The last try was in vain."""
        return self._settle("remove", "given_up", id=webhook_id)

    def _settle(self, statement: str, result: str, **values: str | float) -> bool:
        with self._database.write() as connection:
            if connection.execute(_SQL[statement], values).fetchone() is None:
                return False
            count(connection, WEBHOOKS_TOTAL, result)
        return True


def enqueue(connection: sqlite3.Connection, job: Job) -> None:
    """Write the webhook of a job that has just ended, if it asked for one."""
    if job.webhook_url is None:
        return
    values = {
        "id": f"msg_{secrets.token_hex(16)}",
        "job_id": job.id,
        "event": f"video.{job.status}",
        "url": job.webhook_url,
        "now": job.completed_at,
    }
    connection.execute(_SQL["enqueue"], values)


def drop_of_job(connection: sqlite3.Connection, job_id: str) -> None:
    """Forget the webhooks of a job that is deleted."""
    connection.execute(_SQL["drop_of_job"], {"id": job_id})


def drop_of_expired(connection: sqlite3.Connection, now: float) -> None:
    """Forget the webhooks of the jobs that have expired."""
    connection.execute(_SQL["drop_of_expired"], {"now": now})
