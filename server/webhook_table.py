"""Webhooks that were not delivered yet: written when a job ends, removed when delivered or given up.

Knows: the webhooks table. Does not know: how a webhook is sent or signed, or when the next try is wise.
"""

import secrets
from dataclasses import dataclass

from server.database import Connection, Database, Values, read_statements
from server.job import Job
from server.observations import WEBHOOKS_TOTAL, count

_SQL = read_statements("webhooks.sql")

MAX_DUE = 100
LEASE_SECONDS = 120.0  # longer than any try takes


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

    def due(self, now: float | None = None, per_site: int = MAX_DUE) -> list[Webhook]:
        """Those to be tried now that nobody is sending, longest due first; at most MAX_DUE.

        Of one site there are at most ``per_site``. ``now`` is the database's clock unless given.
        """
        with self._database.read() as connection:
            at = connection.now() if now is None else now
            limits = {"lease_seconds": LEASE_SECONDS, "limit": MAX_DUE, "per_site": per_site}
            rows = connection.all(_SQL["due"], {"now": at} | limits)
        return [Webhook(**row) for row in rows]

    def lease(self, webhook_id: str) -> bool:
        """Whether it is this process that sends it now: for LEASE_SECONDS, or until its end is recorded."""
        with self._database.write() as connection:
            values: Values = {"id": webhook_id, "now": connection.now(), "lease_seconds": LEASE_SECONDS}
            return connection.one(_SQL["lease"], values) is not None

    def release_all(self) -> None:
        """Nobody is sending any: for the start of a server that is the only one."""
        with self._database.write() as connection:
            connection.run(_SQL["release_all"])

    def delivered(self, webhook_id: str) -> bool:
        """The receiver has it."""
        return self._settle("remove", "delivered", webhook_id)

    def failed(self, webhook_id: str, delay_seconds: float) -> bool:
        """A try was in vain; there will be another one after the delay."""
        return self._settle("put_off", "failed", webhook_id, delay_seconds=float(delay_seconds))

    def give_up(self, webhook_id: str) -> bool:
        """The last try was in vain."""
        return self._settle("remove", "given_up", webhook_id)

    def _settle(self, statement: str, result: str, webhook_id: str, **values: float) -> bool:
        with self._database.write() as connection:
            now = connection.now()
            if connection.one(_SQL[statement], {**values, "id": webhook_id, "now": now}) is None:
                return False
            count(connection, WEBHOOKS_TOTAL, result)
        return True


def enqueue(connection: Connection, job: Job) -> None:
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
    connection.run(_SQL["enqueue"], values)


def drop_of_job(connection: Connection, job_id: str) -> None:
    """Forget the webhooks of a job that is deleted."""
    connection.run(_SQL["drop_of_job"], {"id": job_id})


def drop_without_job(connection: Connection) -> None:
    """Forget the webhooks of jobs that have expired and are removed."""
    connection.run(_SQL["drop_without_job"])
