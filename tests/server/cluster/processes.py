"""API and worker processes over one PostgreSQL database and one store, as on many hosts.

Knows: how they are started, killed and waited for. Does not know: what is tested.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import SecretStr

from configs.settings import Settings
from server.database import Database, open_database
from server.storage.marker import NAME as MARKER
from server.workers import Worker, WorkerTable
from tests.faults import processes
from tests.server.running_server import RunningServer, members

MODEL = "reelwright-shapes"
SCRIPTED = "tests.server.cluster.scripted_work"
REAL = "server.cli"


class RunningWorker:
    """One ``reelwright worker`` in its own process group and with its own data folder."""

    def __init__(self, data_dir: Path, flags: tuple[str, ...], env: Mapping[str, str], program: str) -> None:
        self.data_dir = data_dir
        self.log = data_dir.with_name(f"{data_dir.name}.log")
        self._command = [sys.executable, "-m", program, "worker", "--data-dir", str(data_dir), *flags]
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The supervisor."""
        assert self._process is not None
        return self._process.pid

    @property
    def name(self) -> str:
        """What the job table calls it."""
        return (self.data_dir / "worker_name").read_text().strip()

    @property
    def has_ended(self) -> bool:
        """Whether the supervisor has ended."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> None:
        """Start it, for the first time or again."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdout=log, stderr=log, start_new_session=True
            )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor."""
        os.kill(self.pid, number)

    def send_all(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor and its worker process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL all of it: the host is gone."""
        if self._process is None:
            return
        self.send_all(signal.SIGKILL)
        self._process.wait()
        processes.wait_until(lambda: not members(self.pid), "nothing of the worker runs")

    def wait_for_end(self) -> int:
        """Wait for the supervisor; returns its exit code."""
        assert self._process is not None
        return self._process.wait(processes.PATIENCE_SECONDS)

    def logged(self) -> str:
        """What it has logged."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class ScriptedServer(RunningServer):
    """``reelwright serve`` on one host with a scripted worker."""

    def __init__(self, data_dir: Path, *flags: str) -> None:
        super().__init__(data_dir, MODEL, *flags)
        self._command[self._command.index(REAL)] = SCRIPTED


@dataclass
class Cluster:
    """Where the processes meet; what was started within a ``with`` block is killed at its end."""

    folder: Path
    database_url: str
    storage_url: str
    env: Mapping[str, str] = field(default_factory=dict)
    model: str = MODEL
    program: str = SCRIPTED
    _started: ExitStack = field(default_factory=ExitStack)
    _count: int = 0

    def __enter__(self) -> Self:
        self.database: Database = open_database(
            Settings(data_dir=self.folder, database_url=SecretStr(self.database_url))
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._started.close()
        self.database.close()
        if error is not None:
            for log in sorted(self.folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-6000:]}")

    @property
    def _flags(self) -> tuple[str, ...]:
        return ("--database-url", self.database_url, "--storage-url", self.storage_url)

    def api(self, *flags: str) -> RunningServer:
        """Start an API process without a worker."""
        data_dir = self.folder / f"api{self._next()}"
        flags = (*self._flags, "--no-local-worker", *flags)
        return self._started.enter_context(RunningServer(data_dir, self.model, *flags, env=self.env))

    def worker(
        self, *flags: str, model: str | None = None, env: Mapping[str, str] | None = None
    ) -> RunningWorker:
        """Start a worker; it is not ready yet."""
        fixed = ("--model", model or self.model, "--device", "cpu", "--dtype", "float32")
        data_dir = self.folder / f"worker{self._next()}"
        made = RunningWorker(
            data_dir, (*self._flags, *fixed, *flags), {**self.env, **(env or {})}, self.program
        )
        self._started.callback(made.kill)
        made.start()
        return made

    def rows(self) -> dict[str, Worker]:
        """Every slot that the job table knows, by name."""
        return {worker.name: worker for worker in WorkerTable(self.database).all()}

    def wait_until_ready(self, *workers: RunningWorker) -> None:
        """Wait until these workers, started just now, take jobs."""

        def are_ready() -> bool:
            found = {row.supervisor_pid for row in self.rows().values() if row.is_ready}
            assert not any(worker.has_ended for worker in workers), [worker.logged() for worker in workers]
            return {worker.pid for worker in workers} <= found

        processes.wait_until(are_ready, "the workers are ready")

    def worker_pid(self, worker: RunningWorker) -> int:
        """The process that has the model."""
        pid = self.rows()[worker.name].worker_pid
        assert pid is not None
        return pid

    def _next(self) -> int:
        self._count += 1
        return self._count


@contextmanager
def local_cluster(folder: Path, database_url: str) -> Iterator[Cluster]:
    """With a folder that every process can see as the store."""
    store = folder / "store"
    store.mkdir()
    with Cluster(folder, database_url, f"file://{store}") as cluster:
        yield cluster


def stored(folder: Path) -> list[str]:
    """Names of the objects in the folder of ``local_cluster``, without the marker of the database."""
    root = folder / "store"
    names = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MARKER)
