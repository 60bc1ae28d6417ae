"""A full disk under the video, the checkpoint and the table."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import pytest

from tests.faults import processes
from tests.faults.faulty_server import LONG, Ending, FaultyServer
from tests.faults.rows import Row

pytestmark = pytest.mark.alone

FULL_BYTES = 1000  # no file that a job makes is as small
SAVING = LONG | {"checkpoint_every": 1}

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """Let a process, and what it starts, write no file beyond ``FULL_BYTES``: as on a full disk."""
    with processes.limited(pid, resource.RLIMIT_FSIZE, FULL_BYTES):
        yield


def wait_for_step(server: FaultyServer, job_id: str, step: int) -> None:
    """Wait until a job has got so far."""
    processes.wait_until(lambda: server.row(job_id).step >= step, f"the job is at step {step}")


def test_under_the_video(server: FaultyServer) -> None:
    worker = server.worker_pid
    job_id = server.start()
    server.expect(job_id, Ending(status="failed", code="internal"))
    with full_disk(worker):
        error = server.finish(job_id)["error"]
    assert error["retryable"]
    assert str(server.files.videos / job_id) in error["message"]
    server.check_sound()
    assert server.worker_pid == worker


def test_under_the_checkpoint(server: FaultyServer) -> None:
    worker = server.worker_pid
    job_id = server.start(**SAVING)
    wait_for_step(server, job_id, 2)
    with full_disk(worker):
        begun = server.row(job_id).step
        wait_for_step(server, job_id, begun + 4)
        assert server.row(job_id).checkpoint_step <= begun + 1
    (warning,) = server.finish(job_id)["warnings"]
    assert warning.startswith("the checkpoint after step ")
    assert f"could not be written: [Errno {errno.EFBIG}]" in warning
    server.check_sound()
    assert server.worker_pid == worker


def test_under_the_table_of_the_supervisor(server: FaultyServer) -> None:
    supervisor = server.supervisor_pid
    job_id = server.start(**SAVING)
    wait_for_step(server, job_id, 2)
    server.expect(job_id, Ending(attempt=2))
    with full_disk(supervisor):
        processes.wait_until(lambda: processes.state(supervisor) in "ZX", "the supervisor gives up")
    assert server.finish(job_id)["resumed_from_step"] >= 2
    server.check_sound()
    assert server.supervisor_pid != supervisor


def test_under_the_table_of_the_api(server: FaultyServer) -> None:
    server.wait_until_ready()
    job_id = server.start(**LONG)
    with full_disk(server.pid):
        answer = server.client.post("/v1/videos", json={"prompt": "a red circle"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
        assert server.client.get(f"/v1/videos/{job_id}").status_code == 200
    server.finish(job_id)
    server.check_sound()


class ServerOnSmallDisk(FaultyServer):
    """Its data folder is a file system of its own, that only it and its children see."""

    def __init__(self, data_dir: Path, mebibytes: int) -> None:
        mount = f'mount -t tmpfs -o size={mebibytes}m tmpfs {data_dir} && exec "$@"'
        super().__init__(data_dir, wrapper=("unshare", "-rm", "sh", "-c", mount, "sh"))

    @property
    def seen_data_dir(self) -> Path:
        return Path(f"/proc/{self.pid}/root{self.data_dir}")

    def rows(self) -> dict[str, Row]:
        # SQLite follows links, and so would not find the file from here.
        inside = ("nsenter", "--target", str(self.pid), "--user", "--mount", "--preserve-credentials")
        code = f"from tests.faults.rows import print_rows; print_rows({str(self.data_dir)!r})"
        done = subprocess.run(
            [*inside, sys.executable, "-c", code],
            capture_output=True,
            check=True,
            timeout=60,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},  # nsenter does not stay in this folder
        )
        return {job_id: Row(*values) for job_id, values in json.loads(done.stdout).items()}


def can_mount() -> bool:
    """Whether an ordinary user may have a file system of his own here."""
    tried = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/tmp"], capture_output=True, timeout=20
    )
    return tried.returncode == 0


def _wrote(file: FileIO, content: bytes) -> bool:
    try:
        file.write(content)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


def fill(folder: Path) -> Path:
    """Fill the file system to the last byte; returns the file that does."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            while _wrote(file, b"x" * size):
                pass
    return path


@pytest.mark.skipif(not can_mount(), reason="an ordinary user cannot mount a tmpfs here")
def test_under_everything(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    with ServerOnSmallDisk(data_dir, mebibytes=8) as server:
        server.wait_until_ready()
        server.check_sound()
        job_id, queued = server.start(**SAVING), server.start(seed=2)
        wait_for_step(server, job_id, 2)
        filler = fill(server.seen_data_dir)
        server.wait_for(lambda: "database_error" in server.log.read_text())
        refused = server.client.post("/v1/videos", json={"prompt": "a red circle"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "database_unavailable")
        assert server.client.get(f"/v1/videos/{job_id}").json()["status"] == "in_progress"
        filler.unlink()
        server.expect(job_id, Ending(attempt=2))
        server.finish(job_id)
        server.finish(queued)
        server.check_sound()
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait_for_end() == 0
