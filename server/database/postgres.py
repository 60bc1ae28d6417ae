"""PostgreSQL: connections, transactions, schema versions, notifications.

Knows: psycopg and its pool. Does not know: what the tables mean, or how procrastinate keeps its queue
(procrastinate_queue.py). Transactions are READ COMMITTED: who decides on what others may change takes a row
lock or an advisory lock first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import procrastinate
import psycopg
from procrastinate.exceptions import ConnectorException
from procrastinate.schema import SchemaManager
from psycopg import IsolationLevel
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool

from server.database.interface import (
    DatabaseError,
    DatabaseUnavailableError,
    DatabaseVersionError,
    Row,
    Values,
)
from server.database.procrastinate_queue import QUEUE_CHANNEL, ProcrastinateQueue, Raw
from server.database.statements import Statement, migration_scripts

BUSY_SECONDS = 10.0
# A server that has become a standby, and a session that it ended, are as good as away.
PASSING = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.IdleInTransactionSessionTimeout,
)
WAIT_SECONDS = 5.0  # for a connection; then the server counts as away
MOST_CONNECTIONS = 10
CHANGES_CHANNEL = "reelwright_changes"
# A server that vanished without a word is noticed after about 25 seconds.
_ALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 25_000}


class PostgresConnection:
    """A connection as the tables see it."""

    def __init__(self, raw: Raw, gpus: int = 1) -> None:
        self.raw = raw
        self.queue = ProcrastinateQueue(raw, gpus)

    def one(self, statement: Statement, values: Values | None = None) -> Row | None:
        """The first row."""
        return self.raw.execute(statement.postgres.encode(), values or {}).fetchone()

    def all(self, statement: Statement, values: Values | None = None) -> list[Row]:
        """Every row."""
        return self.raw.execute(statement.postgres.encode(), values or {}).fetchall()

    def run(self, statement: Statement, values: Values | None = None) -> None:
        """For a statement without rows."""
        self.raw.execute(statement.postgres.encode(), values or {})

    def now(self) -> float:
        """The server's clock: hosts need not agree on the time. The same during one block."""
        return self._now

    @cached_property
    def _now(self) -> float:
        row = self.raw.execute("SELECT reelwright_now() AS now").fetchone()
        assert row is not None
        return float(row["now"])

    def take_turns(self, name: str) -> None:
        """Hold the advisory lock of that name until the transaction ends."""
        self.raw.execute("SELECT pg_advisory_xact_lock(hashtext('reelwright'), hashtext(%s))", (name,))


class PostgresListener:
    """A connection that only listens to one channel."""

    def __init__(self, raw: Raw, channel: str) -> None:
        self._raw = raw
        with _errors():
            raw.execute(f"LISTEN {channel}".encode())

    def has_changed(self) -> bool:
        """Whether somebody notified the channel."""
        with _errors():
            return len(list(self._raw.notifies(timeout=0))) > 0

    def fileno(self) -> int:
        """The socket."""
        return self._raw.fileno()

    def close(self) -> None:
        """Close its connection."""
        self._raw.close()


class PostgresDatabase:
    """A pool of connections to one database. Connections are opened on demand."""

    is_remote = True

    def __init__(self, url: str, gpus: int = 1) -> None:
        """``gpus``: of the workers that run the jobs put here, or of the one that takes some."""
        self._url = url
        self.gpus: int | None = gpus
        self._gpus = gpus
        self._pool: ConnectionPool[Raw] = ConnectionPool(
            url,
            min_size=0,
            max_size=MOST_CONNECTIONS,
            open=False,
            timeout=WAIT_SECONDS,
            reconnect_timeout=WAIT_SECONDS,  # a longer one would try less and less often
            check=ConnectionPool.check_connection,  # those that a restart of the server broke are replaced
            configure=_configure,
            kwargs=_arguments(),
        )

    @property
    def name(self) -> str:
        """Host, port and name of the database, as far as the URL has them."""
        parts = conninfo_to_dict(self._url)
        host = parts.get("host") or parts.get("hostaddr") or "localhost"
        return f"postgresql://{host}:{parts.get('port') or 5432}/{parts.get('dbname') or ''}"

    @contextmanager
    def read(self) -> Iterator[PostgresConnection]:
        """A pooled connection that commits each statement."""
        with _errors():
            if self._pool.closed:
                self._pool.open()
            with self._pool.connection() as raw:
                yield PostgresConnection(raw, self._gpus)

    @contextmanager
    def write(self) -> Iterator[PostgresConnection]:
        """One transaction."""
        with self.read() as connection, connection.raw.transaction():
            yield connection

    def watch(self) -> PostgresListener:
        """Any change of the jobs table."""
        return PostgresListener(self._connect(), CHANGES_CHANNEL)

    def listen(self) -> PostgresListener:
        """What a supervisor should look at."""
        return PostgresListener(self._connect(), QUEUE_CHANNEL)

    def _connect(self) -> Raw:
        with _errors():
            raw = psycopg.connect(self._url, row_factory=dict_row, autocommit=True, **_timeouts())
            _configure(raw)
            return raw

    def close(self) -> None:
        """Close the pooled connections."""
        self._pool.close()

    def migrate(self) -> None:
        """Make the tables, or bring them up to this version's: all or nothing, one process at a time."""
        scripts = migration_scripts("postgres")
        with _errors(), self._connect() as raw, raw.transaction():
            PostgresConnection(raw).take_turns("migrate")
            raw.execute(
                "CREATE TABLE IF NOT EXISTS reelwright_schema "
                "(version BIGINT PRIMARY KEY, procrastinate TEXT NOT NULL)"
            )
            row = raw.execute("SELECT COALESCE(MAX(version), 0) AS version FROM reelwright_schema").fetchone()
            assert row is not None
            version = int(row["version"])
            if version > len(scripts):
                raise DatabaseVersionError(
                    f"database_url: the database has schema version {version}; this Reelwright knows "
                    f"{len(scripts)}: update it"
                )
            if version == 0:
                raw.execute(SchemaManager.get_schema())
            for number, script in enumerate(scripts[version:], start=version + 1):
                raw.execute(script.read_bytes())
                raw.execute(
                    "INSERT INTO reelwright_schema VALUES (%s, %s)", (number, procrastinate.__version__)
                )


def _timeouts() -> dict[str, Any]:
    return {"connect_timeout": int(BUSY_SECONDS), **_ALIVE}


def _arguments() -> dict[str, object]:
    return {"row_factory": dict_row, "autocommit": True, **_timeouts()}


def _configure(raw: Raw) -> None:
    raw.isolation_level = IsolationLevel.READ_COMMITTED
    raw.execute(f"SET lock_timeout = {int(BUSY_SECONDS * 1000)}".encode())
    raw.execute("SET client_min_messages = warning")


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except ConnectorException as error:
        raise _translated(error.__cause__ or error) from error
    except psycopg.Error as error:
        raise _translated(error) from error


def _translated(error: BaseException) -> DatabaseError:
    message = " ".join(str(error).split())
    is_passing = isinstance(error, PASSING)
    return DatabaseUnavailableError(message) if is_passing else DatabaseError(message)
