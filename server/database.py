"""The SQLite file: connections, transactions, schema versions and named statements.

Knows: how to open the file so that a commit survives a power cut and readers never wait for writers.
Does not know: what the tables mean.
"""

import queue
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

SQL_FOLDER = Path(__file__).parent / "sql"
BUSY_SECONDS = 10.0
_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


class DatabaseVersionError(RuntimeError):
    """The file was written by a newer Reelwright."""


def read_statements(file_name: str) -> dict[str, str]:
    """The statements of one file in sql/, by the name in the comment line above each."""
    parts = _NAME.split((SQL_FOLDER / file_name).read_text(encoding="utf-8"))
    return {name: body.strip().rstrip(";") for name, body in zip(parts[1::2], parts[2::2], strict=True)}


class Database:
    """A pool of connections to one file, for use from any thread. Connections are opened on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._idle: queue.LifoQueue[sqlite3.Connection] = queue.LifoQueue()

    def connect(self) -> sqlite3.Connection:
        """A connection of one's own; the caller closes it."""
        connection = sqlite3.connect(
            self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A pooled connection for reading, or for one statement that commits by itself."""
        try:
            connection = self._idle.get_nowait()
        except queue.Empty:
            connection = self.connect()
        try:
            yield connection
        finally:
            self._idle.put(connection)

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed to disk when the block ends, undone when it raises."""
        with self.read() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # a full disk may have undone it already
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close the pooled connections."""
        while not self._idle.empty():
            self._idle.get_nowait().close()


def migrate(path: Path) -> None:
    """Make the file, or bring its tables up to this version's. Only one process may do so at a time.

    Raises:
        DatabaseVersionError: a newer Reelwright wrote it. sqlite3.Error: it is damaged, or no such file.
    """
    scripts = sorted(SQL_FOLDER.glob("[0-9][0-9][0-9]_*.sql"))
    with closing(Database(path).connect()) as connection:
        fault = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if fault != "ok":
            raise sqlite3.DatabaseError(f"{path} is damaged: {fault}")
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version > len(scripts):
            raise DatabaseVersionError(
                f"{path} has schema version {version}; this Reelwright knows {len(scripts)}: update it"
            )
        for number, script in enumerate(scripts[version:], start=version + 1):
            body = script.read_text(encoding="utf-8")
            connection.executescript(f"BEGIN IMMEDIATE; {body} PRAGMA user_version = {number}; COMMIT;")
