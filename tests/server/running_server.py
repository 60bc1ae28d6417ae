"""A real ``reelwright serve`` in its own process group, for tests."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

START_SECONDS = 120.0


class RunningServer:
    """Started on entry to a ``with`` block; nothing of it is left on exit."""

    def __init__(
        self, data_dir: Path, model: Path | str, *flags: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=30)
        self.log = data_dir.parent / f"{data_dir.name}-{self.port}.log"
        self._command = [
            *(sys.executable, "-m", "server.cli", "serve"),
            *("--port", str(self.port), "--data-dir", str(data_dir), "--model", str(model)),
            *("--device", "cpu", "--dtype", "float32", *flags),
        ]
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdout=log, stderr=log, start_new_session=True
            )
        self.wait_for(self._is_live)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_everything()
        self.client.close()
        if error is not None:
            print(self.log.read_text(errors="replace"))

    @property
    def pid(self) -> int:
        """The API process."""
        assert self._process is not None
        return self._process.pid

    def wait_until_ready(self) -> Self:
        """The worker has loaded the model."""
        self.wait_for(lambda: self.client.get("/health/ready").status_code == 200)
        return self

    def wait_for(self, condition: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Poll until the condition holds; a dead API process ends the wait at once."""
        give_up_at = time.monotonic() + seconds
        while not condition():
            assert self._process is None or self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < give_up_at, f"waited {seconds} s in vain\n{self.log.read_text()}"
            time.sleep(0.05)

    def submit(self, **fields: Any) -> dict[str, Any]:
        """Submit a job as JSON."""
        answer = self.client.post("/v1/videos", json={"prompt": "a red circle"} | fields)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    def submit_long(self, **fields: Any) -> dict[str, Any]:
        """Submit a job of 250 steps, to be interrupted."""
        return self.submit(num_inference_steps=250, size="128x128", **fields)

    def job(self, job_id: str) -> dict[str, Any]:
        """The job object."""
        answer = self.client.get(f"/v1/videos/{job_id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def wait_for_job(self, job_id: str, *statuses: str) -> dict[str, Any]:
        """Wait until a job has one of the statuses (default: any final one)."""
        wanted = statuses or ("completed", "failed", "cancelled")
        self.wait_for(lambda: self.job(job_id)["status"] in wanted)
        return self.job(job_id)

    def wait_for_step(self, job_id: str, step: int = 2) -> dict[str, Any]:
        """Wait until a job is in the middle of its denoise."""
        self.wait_for(lambda: self.job(job_id)["step"] >= step)
        return self.job(job_id)

    def worker(self) -> dict[str, Any]:
        """The worker as /v1/stats shows it."""
        models = self.client.get("/v1/stats").json()["models"]
        return next(dict(model["worker"]) for model in models if model["worker"])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the API process."""
        os.kill(self.pid, number)

    def wait_for_end(self, seconds: float = 60) -> int:
        """Wait for the API process; returns its exit code."""
        assert self._process is not None
        return self._process.wait(seconds)

    def kill_everything(self) -> None:
        """SIGKILL the API process and all its children at once."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.wait_until_nothing_runs()
        self._process = None

    def wait_until_nothing_runs(self) -> None:
        """Wait until every process of the server is gone."""
        give_up_at = time.monotonic() + 30
        while members(self.pid):
            assert time.monotonic() < give_up_at, members(self.pid)
            time.sleep(0.02)

    def _is_live(self) -> bool:
        try:
            return self.client.get("/health/live").status_code == 200
        except httpx.TransportError:
            return False


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def members(group: int) -> list[int]:
    """Living processes of a process group (zombies do not count)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(entry.name))
    return found
