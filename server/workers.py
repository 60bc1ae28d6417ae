"""What the supervisor says about itself and its worker process, for readiness and metrics.

Knows: the workers table. Does not know: how workers are started, or what they run.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from server.database import Connection, Database, Row, read_statements

_SQL = read_statements("workers.sql")

LOCAL_SLOT = "local"
"""The one slot of a server with SQLite."""

HEARTBEAT_SECONDS = 5.0
LOST_AFTER_SECONDS = 30.0

DATA_DIR = "data_dir"

WorkerState = Literal["loading", "ready", "load_failed", "restarting", "stopped"]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker slot. ``message`` says why it is not ready; ``load_seconds`` is the model's load time.

    ``gpus`` counts its ranks. ``device`` is that of rank 0, ``memory_total_bytes`` what each device has,
    ``memory_in_use_bytes`` by device; on a CPU all ranks have the same one. ``files`` is where finished files
    go (``files_of``). None: not known.
    """

    name: str
    state: WorkerState
    message: str
    model: str
    device: str | None
    dtype: str | None
    load_seconds: float | None
    supervisor_pid: int
    worker_pid: int | None
    gpus: int
    memory_total_bytes: int | None
    memory_in_use_bytes: dict[str, int] | None
    files: str | None


@dataclass(frozen=True, slots=True)
class Worker(WorkerReport):
    """A report, when its supervisor last gave a sign of life (seconds since 1970), and how long ago that is.

    Both are by the database's clock.
    """

    heartbeat_at: float
    heartbeat_age_seconds: float

    @property
    def is_alive(self) -> bool:
        """Whether the supervisor's heartbeat is recent."""
        return self.heartbeat_age_seconds < LOST_AFTER_SECONDS

    @property
    def is_ready(self) -> bool:
        """Whether the worker can take jobs."""
        return self.is_alive and self.state == "ready"


class WorkerTable:
    """One row per worker slot."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def report(self, worker: WorkerReport) -> None:
        """Write the row; counts as a heartbeat."""
        with self._database.write() as connection:
            _write(connection, worker)

    def join(self, worker: WorkerReport | None, check: Callable[[Sequence[Worker]], None]) -> list[Worker]:
        """Write the first row of a start, unless ``check`` raises for the others that live; returns these.

        Of two that start at once, the second sees the first.
        """
        with self._database.write() as connection:
            connection.take_turns("join")
            now, own = connection.now(), None if worker is None else worker.name
            found = [_worker(row, now) for row in connection.all(_SQL["all"]) if row["name"] != own]
            others = [each for each in found if each.is_alive and each.state != "stopped"]
            check(others)
            if worker is not None:
                _write(connection, worker)
        return others

    def forget_all(self) -> None:
        """Drop what an earlier run left: for a server that is the only one."""
        with self._database.read() as connection:
            connection.run(_SQL["forget_all"])

    def forget(self, name: str) -> None:
        """Drop one slot. Claims that it still holds count as lost from now on."""
        with self._database.read() as connection:
            connection.run(_SQL["forget"], {"name": name})

    def forget_silent(self, seconds: float) -> None:
        """Drop the slots that gave no sign of life for so long: hosts that are gone."""
        with self._database.write() as connection:
            connection.run(_SQL["forget_silent"], {"since": connection.now() - seconds})

    def all(self) -> list[Worker]:
        """Every slot, by name."""
        with self._database.read() as connection:
            now = connection.now()
            rows = connection.all(_SQL["all"])
        return [_worker(row, now) for row in rows]


def files_of(storage_url: str | None) -> str:
    """What a worker's row says of its finished files: the store's URL, or that they stay in its folder."""
    return DATA_DIR if storage_url is None else storage_url


def starting_report(name: str, model: str, gpus: int, files: str | None) -> WorkerReport:
    """What a worker of this process says before there is more to say."""
    return WorkerReport(
        name=name,
        state="loading",
        message=f"loading {model}",
        model=model,
        device=None,
        dtype=None,
        load_seconds=None,
        supervisor_pid=os.getpid(),
        worker_pid=None,
        gpus=gpus,
        memory_total_bytes=None,
        memory_in_use_bytes=None,
        files=files,
    )


def _write(connection: Connection, worker: WorkerReport) -> None:
    values = {name: getattr(worker, name) for name in WorkerReport.__dataclass_fields__}
    in_use = values.pop("memory_in_use_bytes")
    values["memory_in_use"] = None if in_use is None else json.dumps(in_use)
    connection.run(_SQL["report"], values | {"now": connection.now()})
    connection.queue.beat(worker.name)


def _worker(row: Row, now: float) -> Worker:
    values = dict(row)
    in_use = values.pop("memory_in_use")
    return Worker(
        **values,
        memory_in_use_bytes=None if in_use is None else json.loads(in_use),
        heartbeat_age_seconds=now - row["heartbeat_at"],
    )
