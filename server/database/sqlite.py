"""The SQLite file: connections, transactions, schema versions.

Knows: how to open the file so that a commit survives a power cut and readers never wait for writers.
Does not know: what the tables mean.
"""

import queue
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from server.database.interface import (
    Connection,
    DatabaseError,
    DatabaseUnavailableError,
    DatabaseVersionError,
    Row,
    Values,
)
from server.database.statements import Statement, migration_scripts, read_statements

BUSY_SECONDS = 10.0
_QUEUE = read_statements("queue.sql")


class TableQueue:
    """The job table is its own queue: a transaction holds the whole file, so there is nothing else to do."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def put(self, job_id: str, model: str, priority: int, gpus: int | None) -> None:
        """The row says it."""

    def take(self, model: str, worker: str) -> str | None:
        """The next one's id."""
        row = self._connection.one(_QUEUE["next"], {"model": model})
        return None if row is None else str(row["id"])

    def hold(self, job_id: str) -> None:
        """The transaction does."""

    def put_back(self, job_id: str, model: str, priority: int, gpus: int | None) -> None:
        """The row says it."""

    def remove(self, job_id: str) -> None:
        """The row says it."""

    def announce(self) -> None:
        """Nobody listens: the API process wakes its supervisor through a pipe."""

    def beat(self, worker: str) -> None:
        """The workers table says it."""

    def tidy(self, lost_after_seconds: float) -> None:
        """Nothing is kept beside the tables."""


class SqliteConnection:
    """A connection as the tables see it."""

    def __init__(self, raw: sqlite3.Connection) -> None:
        self.raw = raw
        self.queue = TableQueue(self)

    def one(self, statement: Statement, values: Values | None = None) -> Row | None:
        """The first row."""
        row: Row | None = self.raw.execute(statement.sqlite, values or {}).fetchone()
        return row

    def all(self, statement: Statement, values: Values | None = None) -> list[Row]:
        """Every row."""
        return self.raw.execute(statement.sqlite, values or {}).fetchall()

    def run(self, statement: Statement, values: Values | None = None) -> None:
        """For a statement without rows."""
        self.raw.execute(statement.sqlite, values or {})

    def now(self) -> float:
        """This host's clock: every process of the file runs on it."""
        return time.time()

    def take_turns(self, name: str) -> None:
        """Writers of one file take turns anyway."""


class SqliteWatch:
    """Looks at a number of SQLite's that moves when another connection commits."""

    def __init__(self, raw: sqlite3.Connection) -> None:
        self._raw = raw
        self._version = self._read()

    def has_changed(self) -> bool:
        """Whether anything was committed."""
        with _errors():
            before, self._version = self._version, self._read()
        return before != self._version

    def _read(self) -> int:
        return int(self._raw.execute("PRAGMA data_version").fetchone()["data_version"])

    def close(self) -> None:
        """Close its connection."""
        self._raw.close()


class SqliteDatabase:
    """A pool of connections to one file. Connections are opened on demand."""

    is_remote = False
    gpus: int | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._idle: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()

    @property
    def name(self) -> str:
        """Host and file."""
        return f"{socket.gethostname()}:{self.path}"

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = _row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    @contextmanager
    def read(self) -> Iterator[SqliteConnection]:
        """A pooled connection."""
        with _errors():
            try:
                raw = self._idle.get_nowait()
            except queue.Empty:
                raw = self._connect()
            try:
                yield SqliteConnection(raw)
            finally:
                self._idle.put(raw)

    @contextmanager
    def write(self) -> Iterator[SqliteConnection]:
        """One transaction."""
        with self.read() as connection:
            connection.raw.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.raw.execute("COMMIT")
            except BaseException:
                if connection.raw.in_transaction:  # a full disk may have undone it already
                    connection.raw.execute("ROLLBACK")
                raise

    def watch(self) -> SqliteWatch:
        """Any change of the file."""
        with _errors():
            return SqliteWatch(self._connect())

    def listen(self) -> None:
        """SQLite tells no other process of a change."""

    def close(self) -> None:
        """Close the pooled connections."""
        while not self._idle.empty():
            self._idle.get_nowait().close()

    def migrate(self) -> None:
        """Make the file, or bring its tables up to this version's. Only one process may do so at a time."""
        scripts = migration_scripts("sqlite")
        with _errors(), closing(self._connect()) as connection:
            fault = connection.execute("PRAGMA quick_check(1)").fetchone()["quick_check"]
            if fault != "ok":
                raise DatabaseError(f"{self.path} is damaged: {fault}")
            version = int(connection.execute("PRAGMA user_version").fetchone()["user_version"])
            if version > len(scripts):
                raise DatabaseVersionError(
                    f"{self.path} has schema version {version}; "
                    f"this Reelwright knows {len(scripts)}: update it"
                )
            for number, script in enumerate(scripts[version:], start=version + 1):
                body = script.read_text(encoding="utf-8")
                connection.executescript(f"BEGIN IMMEDIATE; {body} PRAGMA user_version = {number}; COMMIT;")


def _row(cursor: sqlite3.Cursor, values: tuple[object, ...]) -> Row:
    return {column[0]: value for column, value in zip(cursor.description, values, strict=True)}


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise DatabaseUnavailableError(str(error)) from error
    except sqlite3.Error as error:
        raise DatabaseError(str(error)) from error
