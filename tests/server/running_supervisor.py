"""A real supervisor in a thread of the test, with real worker processes, table and data folder; no HTTP."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from configs.model_preset import ModelPreset
from configs.settings import Settings
from server.database import SqliteDatabase
from server.files import DataFolder
from server.job import Job
from server.jobs import JobTable
from server.lock import acquire
from server.protocol import Drain, WakeUp
from server.supervisor import Supervisor, SupervisorStart
from server.workers import Worker, WorkerTable
from tests.server.samples import new_job

PATIENCE_SECONDS = 60.0


class RunningSupervisor:
    """Started on entry to a ``with`` block; drained, with no time given, on exit."""

    def __init__(self, data_dir: Path, preset: ModelPreset, **settings: float | str) -> None:
        self.settings = Settings.model_validate(
            {"data_dir": data_dir, "device": "cpu", "dtype": "float32", **settings}
        )
        self.files = DataFolder(data_dir)
        self.files.create()
        self.database = SqliteDatabase(self.files.database)
        self.database.migrate()
        self.jobs = JobTable(self.database)
        self._workers = WorkerTable(self.database)
        self._lock = acquire(self.files.lock)
        self._pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        self._supervisor = Supervisor(SupervisorStart(self.settings, preset, self._lock), theirs)
        self._thread = threading.Thread(target=self._supervisor.run, name="supervisor")
        self._model = preset.name

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_for(lambda: any(worker.is_ready for worker in self._workers.all()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drain(0)
        self._pipe.close()
        self._lock.release()
        self.database.close()

    def drain(self, seconds: float) -> None:
        """Have the supervisor end."""
        if self._thread.is_alive():
            self._pipe.send(Drain(seconds))
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def submit(
        self,
        prompt: str,
        *,
        priority: int = 0,
        deadline_seconds: float | None = None,
        checkpoint_every: int = 0,
    ) -> str:
        """Queue a small job; returns its id. The prompt of a scripted worker's job is its script."""
        new = new_job(self._model, priority=priority)
        parameters = new.parameters.model_copy(
            update={"prompt": prompt, "checkpoint_every": checkpoint_every}
        )
        new = replace(new, parameters=parameters, deadline_seconds=deadline_seconds)
        job_id = self.jobs.submit(new).job.id
        self.wake()
        return job_id

    def wake(self) -> None:
        """Tell the supervisor that the table changed."""
        self._pipe.send(WakeUp())

    def let(self, name: str) -> None:
        """Let the jobs go on that wait for this name."""
        (self.files.root / name).touch()

    def job(self, job_id: str) -> Job:
        """The job as the table has it."""
        job = self.jobs.find(job_id)
        assert job is not None
        return job

    def wait_for_job(self, job_id: str, *statuses: str) -> Job:
        """Wait until a job has one of the statuses (default: any final one)."""
        wanted = statuses or ("completed", "failed", "cancelled")
        self.wait_for(lambda: self.job(job_id).status in wanted)
        return self.job(job_id)

    def worker(self) -> Worker:
        """What the supervisor reports."""
        (worker,) = self._workers.all()
        return worker

    def worker_pid(self) -> int:
        """The worker process."""
        pid = self.worker().worker_pid
        assert pid is not None
        return pid

    def files_of(self, job_id: str) -> list[str]:
        """Names in a job's folder."""
        folder = self.files.videos / job_id
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Poll until the condition holds."""
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self._thread.is_alive(), "the supervisor has ended"
            assert time.monotonic() < give_up_at, f"waited {PATIENCE_SECONDS} s in vain"
            time.sleep(0.01)
