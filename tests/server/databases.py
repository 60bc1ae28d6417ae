"""One empty job database of either engine, and its clock."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest
from pydantic import SecretStr

from configs.settings import Settings
from server.database import Database, Row, Statement, open_database
from server.workers import WorkerReport
from tests.postgres import PostgresServer, binaries

ENGINES = ("sqlite", "postgres")
_time, _time_ns = time.time, time.time_ns


@dataclass
class JobDatabase:
    """The settings that lead to it, and what is open of it in this process."""

    settings: Settings
    database: Database = field(init=False)

    def __post_init__(self) -> None:
        self.database = open_database(self.settings)

    @property
    def url(self) -> str | None:
        """PostgreSQL's; None for SQLite."""
        url = self.settings.database_url
        return None if url is None else url.get_secret_value()


@contextmanager
def job_database(engine: str, folder: Path, postgres: Callable[[], PostgresServer]) -> Iterator[JobDatabase]:
    """A new database with empty tables."""
    if engine == "postgres":
        with postgres().database() as url:
            made = JobDatabase(Settings(data_dir=folder, database_url=SecretStr(url)))
            yield made
            made.database.close()
        return
    made = JobDatabase(Settings(data_dir=folder))
    made.database.migrate()
    yield made
    made.database.close()


DISAGREEMENTS = Statement(
    sqlite="SELECT id AS job, status, NULL AS queued FROM jobs WHERE FALSE",
    postgres="""
SELECT jobs.id AS job, jobs.status, queue.status AS queued FROM jobs
FULL JOIN (queue_rows JOIN procrastinate_jobs AS queue ON queue.id = queue_id) ON job_id = jobs.id
WHERE (CASE jobs.status WHEN 'queued' THEN 'todo' WHEN 'in_progress' THEN 'doing' END)
      IS DISTINCT FROM CAST(queue.status AS TEXT)
UNION ALL
SELECT args ->> 'job_id', NULL, status FROM procrastinate_jobs
WHERE NOT EXISTS (SELECT 1 FROM queue_rows WHERE queue_id = procrastinate_jobs.id)
""",
)


def worker_report(name: str) -> WorkerReport:
    """A slot that takes jobs."""
    return WorkerReport(
        name=name,
        state="ready",
        message="",
        model="tiny-wan",
        device="cpu",
        dtype="float32",
        load_seconds=1.0,
        supervisor_pid=1,
        worker_pid=2,
        gpus=1,
        memory_total_bytes=None,
        memory_in_use_bytes=None,
        files=None,
    )


def disagreements(database: Database) -> list[Row]:
    """Jobs of which the queue does not say what the job table says: none, ever."""
    with database.read() as connection:
        return connection.all(DISAGREEMENTS)


class Clock:
    """The clock that the tables go by: this process's for SQLite, the server's for PostgreSQL."""

    def __init__(self, made: JobDatabase, patch: pytest.MonkeyPatch) -> None:
        self._made = made
        self._patch = patch

    def shift(self, seconds: float) -> None:
        """Set it: so much later (or earlier) than the true time."""
        if self._made.url is None:
            self._patch.setattr("time.time", lambda: _time() + seconds)
            self._patch.setattr("time.time_ns", lambda: _time_ns() + int(seconds * 1e9))
            return
        self.say(f"CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION) + {seconds!r}")

    def stop_at(self, now: float) -> None:
        """Set it to a time where it stays."""
        if self._made.url is None:
            self._patch.setattr("time.time", lambda: now)
            self._patch.setattr("time.time_ns", lambda: int(now * 1e9))
            return
        self.say(f"CAST({now!r} AS DOUBLE PRECISION)")

    def say(self, expression: str) -> None:
        """Have PostgreSQL's tables believe that this is the time."""
        assert self._made.url is not None
        statement = (
            "CREATE OR REPLACE FUNCTION reelwright_now() RETURNS DOUBLE PRECISION LANGUAGE SQL VOLATILE "
            f"AS $$ SELECT {expression} $$"
        )
        with psycopg.connect(self._made.url, autocommit=True) as connection:
            connection.execute(statement.encode())


def require_postgres() -> None:
    """Skip where PostgreSQL is not installed; CI installs it."""
    if binaries() is None:
        pytest.skip("PostgreSQL's programs (initdb, postgres) are not installed")
