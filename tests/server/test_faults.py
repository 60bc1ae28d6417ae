"""Faults of the machine under a whole server: a hung worker, a full disk, a second server, a killed one."""

import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.server.running_server import RunningServer, free_port

FLAGS = ("--worker-timeout-seconds", "5", "--drain-seconds", "1")
FULL_BYTES = 24_000  # more than the log has when it matters, less than a video or the table's WAL


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of this module."""
    return tmp_path_factory.mktemp("faults") / "data"


@pytest.fixture(scope="module")
def faulty(data_dir: Path, model_file: Path) -> Iterator[RunningServer]:
    """A server whose parts are hurt."""
    with RunningServer(data_dir, model_file, *FLAGS) as server:
        yield server.wait_until_ready()


def submit(server: RunningServer, steps: int = 4) -> str:
    """A clip whose MP4 and checkpoint are larger than ``FULL_BYTES``."""
    return str(server.submit(size="128x128", num_inference_steps=steps)["id"])


def files(server: RunningServer) -> set[str]:
    """Every file below the video folder."""
    root = server.data_dir / "videos"
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def has_logged(server: RunningServer, event: str, times: int) -> bool:
    """Whether an event is that often in the log."""
    return server.log.read_text().count(event) == times


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """Let a process write no file beyond ``FULL_BYTES``: its writes fail as on a full disk."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        try:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        except ProcessLookupError:
            return


def test_the_device_hardly_idles_between_two_jobs(faulty: RunningServer) -> None:
    jobs = [submit(faulty) for _ in range(5)]
    for job_id in jobs:
        assert faulty.wait_for_job(job_id)["status"] == "completed"
    lines = [json.loads(line) for line in faulty.log.read_text().splitlines() if line.startswith("{")]
    started = {line["job"]: at for at, line in enumerate(lines) if line["event"] == "job_started"}
    completed = {line["job"]: at for at, line in enumerate(lines) if line["event"] == "job_completed"}
    overlapping = [started[after] < completed[before] for before, after in itertools.pairwise(jobs)]
    assert all(overlapping)
    idle = [line["seconds"] for line in lines if line["event"] == "device_was_idle"]
    assert len(idle) == len(jobs) - 1
    print(f"idle seconds between jobs: {idle}")
    writing = statistics.median(faulty.job(job_id)["metrics"]["encode_seconds"] for job_id in jobs)
    assert statistics.median(idle) < writing


def test_a_full_disk_fails_the_video_and_not_the_worker(faulty: RunningServer) -> None:
    worker = faulty.worker()["worker_pid"]
    with full_disk(worker):
        job_id = submit(faulty)
        failed = faulty.wait_for_job(job_id)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "internal")
        assert not [name for name in files(faulty) if job_id in name]
    done = faulty.wait_for_job(submit(faulty))
    assert done["status"] == "completed"
    assert faulty.worker()["worker_pid"] == worker


def test_a_full_disk_under_the_table_restarts_the_supervisor(faulty: RunningServer) -> None:
    job_id = submit(faulty, steps=200)
    pids = []
    for times in (1, 2):  # as often as a worker's death would fail it
        faulty.wait_for(lambda: faulty.worker()["supervisor_pid"] not in pids)
        faulty.wait_for_step(job_id)
        pids.append(faulty.worker()["supervisor_pid"])
        with full_disk(pids[-1]):
            # Its own last line may be lost: the log is a file too. The API process writes this one.
            faulty.wait_for(partial(has_logged, faulty, "supervisor_died", times))
    after = submit(faulty)
    job = faulty.wait_for_job(job_id)
    assert (job["status"], job["attempt"]) == ("completed", 3)
    assert faulty.wait_for_job(after)["status"] == "completed"
    assert faulty.worker()["supervisor_pid"] not in pids


def test_a_hung_worker_is_killed_and_its_job_runs_again(faulty: RunningServer) -> None:
    worker = faulty.worker()["worker_pid"]
    job_id = submit(faulty, steps=100)
    faulty.wait_for_step(job_id)
    os.kill(worker, signal.SIGSTOP)
    job = faulty.wait_for_job(job_id)
    assert (job["status"], job["attempt"]) == ("completed", 2)
    assert "gave no sign of life for 5 seconds" in faulty.log.read_text()
    assert faulty.worker()["worker_pid"] != worker


def test_a_job_over_its_deadline_fails_and_the_worker_lives(faulty: RunningServer) -> None:
    worker = faulty.worker()["worker_pid"]
    job_id = faulty.submit_long(deadline_seconds=1)["id"]
    failed = faulty.wait_for_job(job_id)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "deadline_exceeded")
    assert not failed["error"]["retryable"]
    assert failed["step"] >= 1
    assert faulty.worker()["worker_pid"] == worker


def test_one_data_folder_has_one_server_even_when_that_is_killed(
    faulty: RunningServer, data_dir: Path, model_file: Path
) -> None:
    done = submit(faulty)
    faulty.wait_for_job(done)
    second = subprocess.run(
        [
            *(sys.executable, "-m", "server.cli", "serve", "--port", str(free_port())),
            *("--data-dir", str(data_dir), "--model", str(model_file)),
        ],
        capture_output=True,
        text=True,
    )
    assert second.returncode == 1
    assert f"in use by another server (process {faulty.pid})" in second.stderr
    assert "Traceback" not in second.stderr

    running, queued = faulty.submit_long()["id"], submit(faulty)
    faulty.wait_for_step(running)
    faulty.signal(signal.SIGKILL)  # its children may live for a moment, and still hold the lock
    with RunningServer(data_dir, model_file, *FLAGS) as heir:
        again, next_one = heir.wait_for_job(running), heir.wait_for_job(queued)
        assert (again["status"], again["attempt"]) == ("completed", 2)
        assert (next_one["status"], next_one["attempt"]) == ("completed", 1)
        assert heir.client.get(f"/v1/videos/{done}/content").status_code == 200
        known = {video["id"] for video in heir.client.get("/v1/videos", params={"limit": 100}).json()["data"]}
        assert {name.partition("/")[0] for name in files(heir)} <= known
        assert {f"{running}/2.mp4", f"{queued}/1.mp4", f"{done}/1.mp4"} <= files(heir)
        assert f"{running}/1.mp4" not in files(heir)
