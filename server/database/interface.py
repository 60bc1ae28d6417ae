"""What the tables need of a database, whichever engine it is.

Knows: transactions, rows, the queue of waiting jobs, errors. Does not know: SQLite (sqlite.py), PostgreSQL
(postgres.py), or what the tables mean.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from server.database.statements import Statement

Value = str | int | float | None
Values = Mapping[str, Value]
Row = dict[str, Any]
"""One row, by column."""


class DatabaseError(Exception):
    """The database refused: damaged, of another layout, or a rule of its tables would be broken."""


class DatabaseUnavailableError(DatabaseError):
    """It cannot be used now and may be later: full disk, locked for long, server gone."""


class DatabaseVersionError(DatabaseError):
    """It was written by a newer Reelwright."""


class JobQueue(Protocol):
    """Which waiting job is next, inside the transaction of the connection that it belongs to.

    SQLite's queue is the job table itself. PostgreSQL's is procrastinate's, with one row of its own for each
    job that waits or runs; it changes in the transaction of the job's row, so neither is without the other.
    """

    def put(self, job_id: str, model: str, priority: int, gpus: int | None) -> None:
        """The job waits for a worker with so many GPUs."""

    def take(self, model: str, worker: str) -> str | None:
        """Id of the waiting job of that model whose turn it is: now the worker's alone. None: none waits."""

    def hold(self, job_id: str) -> None:
        """Let nobody else take, end or give back the job until this transaction ends.

        Comes before the first write of the job's row: with one order for all, nobody waits in a circle.
        """

    def put_back(self, job_id: str, model: str, priority: int, gpus: int | None) -> None:
        """A job that was taken waits again, before the later ones of its priority."""

    def remove(self, job_id: str) -> None:
        """The job has ended or is deleted, whether it waited or ran."""

    def announce(self) -> None:
        """Wake those who listen when the transaction is committed, as ``put`` and ``put_back`` do."""

    def beat(self, worker: str) -> None:
        """The worker lives."""

    def tidy(self, lost_after_seconds: float) -> None:
        """Forget workers that were silent for longer, and queue again what waits without its place."""


class Connection(Protocol):
    """One connection, inside one transaction or outside any."""

    @property
    def queue(self) -> JobQueue:
        """The waiting jobs."""

    def one(self, statement: Statement, values: Values = ...) -> Row | None:
        """The first row."""

    def all(self, statement: Statement, values: Values = ...) -> list[Row]:
        """Every row."""

    def run(self, statement: Statement, values: Values = ...) -> None:
        """For a statement without rows."""

    def now(self) -> float:
        """Seconds since 1970 by the database's clock: this host's for SQLite, its server's for PostgreSQL."""

    def take_turns(self, name: str) -> None:
        """Wait until no other transaction that took turns under this name is open."""


class Watch(Protocol):
    """Tells that somebody committed a change of a job."""

    def has_changed(self) -> bool:
        """Whether there was one since the last call. Never waits."""

    def close(self) -> None:
        """Stop to watch."""


class Listener(Watch, Protocol):
    """A watch that a loop can wait for: ready to read when ``has_changed`` may say yes."""

    def fileno(self) -> int:
        """The file descriptor."""


class Database(Protocol):
    """For use from any thread. Every method and block raises DatabaseError."""

    is_remote: bool
    """Whether it is reached over a network, by many hosts: every call may wait for seconds."""

    gpus: int | None
    """How many a worker has that takes the jobs submitted here; None: any worker of the model does."""

    @property
    def name(self) -> str:
        """Where it is, for people: without a password."""

    def migrate(self) -> None:
        """Make the tables, or bring them up to this version's. Raises DatabaseVersionError for newer ones."""

    def read(self) -> AbstractContextManager[Connection]:
        """A connection for reading, or for one statement that commits by itself."""

    def write(self) -> AbstractContextManager[Connection]:
        """One transaction: committed to disk when the block ends, undone when it raises."""

    def watch(self) -> Watch:
        """For event streams: any change of any job."""

    def listen(self) -> Listener | None:
        """For supervisors: a job to take, or a cancel or delete to see. None: the engine wakes nobody."""

    def close(self) -> None:
        """Close every connection."""
