"""A real server with the bundled model that is hurt, and what must hold after each hurt.

Knows: the job table's file, the data folder, the log and the processes of the server. Does not know: faults.
"""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.files import DataFolder
from tests.faults import processes
from tests.faults.rows import Row, read_rows
from tests.server.running_server import RunningServer, members

MODEL = "reelwright-shapes"
SMALL = {"size": "64x64", "num_frames": 5, "num_inference_steps": 2, "seed": 1}  # 0.3 s
LONG = SMALL | {"num_inference_steps": 40}  # 2 s
SETTLED_SECONDS = 0.02
# Beside what it had at first: what a process of that size may have come to hold.
MORE_MEMORY = 1.5


@dataclass(frozen=True)
class Ending:
    """How a job must end."""

    attempt: int = 1
    losses: int = 0
    status: str = "completed"
    code: str | None = None


class FaultyServer(RunningServer):
    """Remembers every job it was given, and how each must end; by default undisturbed."""

    def __init__(
        self,
        data_dir: Path,
        *flags: str,
        model: Path | str = MODEL,
        env: Mapping[str, str] | None = None,
        wrapper: tuple[str, ...] = (),
    ) -> None:
        super().__init__(data_dir, model, *flags, env=env)
        self._command = [*wrapper, *self._command]
        self._endings: dict[str, Ending] = {}
        self._memory: dict[str, int] = {}

    @property
    def seen_data_dir(self) -> Path:
        """The data folder, from outside of what the server may be wrapped in."""
        return self.data_dir

    @property
    def files(self) -> DataFolder:
        """Its paths."""
        return DataFolder(self.seen_data_dir)

    @property
    def worker_pid(self) -> int:
        return int(self.worker()["worker_pid"])

    @property
    def supervisor_pid(self) -> int:
        return int(self.worker()["supervisor_pid"])

    def start(self, **fields: Any) -> str:
        """Submit a job; returns its id."""
        job_id = str(self.submit(**(SMALL | fields))["id"])
        self._endings[job_id] = Ending()
        return job_id

    def expect(self, job_id: str, ending: Ending) -> None:
        """It must end like that."""
        self._endings[job_id] = ending

    def finish(self, job_id: str) -> dict[str, Any]:
        """Wait until a job has ended, as it must."""
        job = self.wait_for_job(job_id)
        wanted, found = self._endings[job_id], _ending(self.row(job_id))
        self._endings[job_id] = found  # told once: the tests after this one are not to blame
        assert found == wanted, f"{job}\n{self.story()}"
        return job

    def rows(self) -> dict[str, Row]:
        """The whole table."""
        return read_rows(self.data_dir)

    def restart(self) -> None:
        """Start again on the same folder; whatever still runs is killed."""
        self.kill_everything()
        self.__enter__()

    def row(self, job_id: str) -> Row:
        """Straight from the table: sooner than over HTTP, and whether or not the API answers."""
        return self.rows()[job_id]

    def settled(self, holds: Callable[[], bool]) -> bool:
        """Whether something holds of the table once the supervisor has read what a stopped worker said."""
        supervisor = self.supervisor_pid

        def counts() -> list[int]:
            return sorted(row.version for row in self.rows().values())

        before = None
        while before != counts() or processes.state(supervisor) != "S":
            before = counts()
            processes.wait_until(
                lambda: processes.state(supervisor) in "SX", "the supervisor has nothing to do", 20
            )
            _pause()
        return holds()

    def run_worker_until(self, holds: Callable[[], bool], what: str) -> int:
        """Let the worker run in slices until something holds; returns its pid; it is left standing."""
        worker = self.worker_pid
        processes.run_in_slices(worker, lambda: self.settled(holds), what)
        return worker

    def check_sound(self) -> None:
        """What must hold after every fault, for every job that this server ever had."""
        self.finish(self.start())  # the next job is fine
        self._check_table()
        self._check_log()
        self._check_files()
        self._check_processes()

    def video(self, job_id: str) -> bytes:
        """A finished job's file, over HTTP; it is what the job says it is."""
        content = self.client.get(f"/v1/videos/{job_id}/content")
        assert content.status_code == 200, content.text
        assert hashlib.sha256(content.content).hexdigest() == self.job(job_id)["file"]["sha256"]
        return content.content

    def story(self) -> str:
        """The newest log lines without the requests, for a failing test."""
        lines = [line for line in self.logged() if line["event"] != "request"]
        return "\n".join(json.dumps(line) for line in lines[-40:])

    def logged(self) -> list[dict[str, Any]]:
        """All log lines so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def _check_table(self) -> None:
        found = {job_id: _ending(row) for job_id, row in self.rows().items()}
        assert found == self._endings  # none lost, none in progress, none run once too often

    def _check_log(self) -> None:
        completed = Counter(line["job"] for line in self.logged() if line["event"] == "job_completed")
        wanted = [job_id for job_id, ending in self._endings.items() if ending.status == "completed"]
        assert completed == Counter(wanted)
        assert "Traceback" not in self.log.read_text()

    def _check_files(self) -> None:
        wanted = set()
        for job_id, ending in self._endings.items():
            if ending.status == "completed":
                names = (f"{ending.attempt}{end}" for end in (".mp4", ".thumbnail.jpg", ".spritesheet.jpg"))
                wanted |= {f"videos/{job_id}/{name}" for name in names}
                self.video(job_id)
        root = self.seen_data_dir
        found = {path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()}
        own = {"lock", "jobs.sqlite3", "jobs.sqlite3-wal", "jobs.sqlite3-shm"}
        assert found - own == wanted
        folders = {path.name for path in self.files.videos.iterdir()}
        assert folders == {name.split("/")[1] for name in wanted}

    def _check_processes(self) -> None:
        pids = {"api": self.pid, "supervisor": self.supervisor_pid, "worker": self.worker_pid}
        started = [pid for pid in members(self.pid) if "spawn_main" in processes.command(pid)]
        assert sorted(started) == sorted([pids["supervisor"], pids["worker"]])
        assert processes.ffmpeg_of(pids["worker"]) is None
        for name, pid in pids.items():
            found = processes.resident_bytes(pid)
            assert found < MORE_MEMORY * self._memory.setdefault(name, found), (name, found, self._memory)


def _ending(row: Row) -> Ending:
    code = json.loads(row.error)["code"] if row.error else None
    return Ending(row.attempt, row.losses, row.status, code)


def _pause() -> None:
    # No longer than a commit takes: whether nothing more comes is what is asked, not waited for.
    os.sched_yield()
    time.sleep(SETTLED_SECONDS)
