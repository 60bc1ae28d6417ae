"""The same server in two sizes: all on one host with SQLite, or API processes and a worker with PostgreSQL.

Knows: how each is hurt. Does not know: what must hold then.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.faults import processes
from tests.postgres import PostgresServer
from tests.server.cluster.processes import RunningWorker, ScriptedServer, local_cluster
from tests.server.running_server import RunningServer

STEPS = {"num_inference_steps": 3}


@dataclass(frozen=True)
class Site:
    """``first`` and ``second`` are two API processes, or twice the one that there is."""

    engine: str
    first: RunningServer
    second: RunningServer
    worker: RunningWorker | None

    @property
    def data_dir(self) -> Path:
        """Of the worker."""
        return self.worker.data_dir if self.worker else self.first.data_dir

    def submit(self, prompt: str, **fields: Any) -> str:
        """Queue a job whose prompt is its script."""
        return str(self.first.submit(prompt=prompt, **STEPS, **fields)["id"])

    def let(self, name: str) -> None:
        """Let the jobs go on that wait for this name."""
        (self.data_dir / name).touch()

    def wait_for_stage(self, job_id: str, stage: str = "denoise") -> None:
        """Wait until a job is there."""
        self.second.wait_for(lambda: self.second.job(job_id)["stage"] == stage)

    def kill_worker(self) -> None:
        """SIGKILL the process that has the model."""
        processes.kill(int(self.second.worker()["worker_pid"]))

    def kill_api(self) -> None:
        """SIGKILL the first API process, and start it again."""
        self.first.signal(signal.SIGKILL)
        self.first.wait_for_end()
        self.first.__enter__()

    def drain(self) -> None:
        """SIGTERM whoever has the worker, and start it again when it has ended in order."""
        if self.worker is None:
            self.first.signal(signal.SIGTERM)
            assert self.first.wait_for_end() == 0
            self.first.__enter__()
        else:
            self.worker.send(signal.SIGTERM)
            assert self.worker.wait_for_end() == 0
            self.worker.start()
        self.first.wait_until_ready()


@contextmanager
def open_site(engine: str, folder: Path, postgres: PostgresServer | None) -> Iterator[Site]:
    """A ready one."""
    flags = ("--drain-seconds", "0")
    if postgres is None:
        with ScriptedServer(folder / "data", *flags) as server:
            yield Site(engine, server.wait_until_ready(), server, None)
        return
    with postgres.database() as url, local_cluster(folder, url) as cluster:
        worker = cluster.worker(*flags)
        first, second = cluster.api(), cluster.api()
        cluster.wait_until_ready(worker)
        yield Site(engine, first.wait_until_ready(), second, worker)


def events(server: RunningServer, job_id: str, after: str = "") -> list[tuple[str, str]]:
    """All (name, id) of the job's event stream until its end."""
    headers = {"Last-Event-ID": after} if after else {}
    answer = httpx.get(f"{server.url}/v1/videos/{job_id}/events", headers=headers, timeout=60)
    found = []
    for block in answer.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in lines:
            found.append((lines["event"], lines["id"]))
    return found
