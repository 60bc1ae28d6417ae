"""SIGKILL of all processes, of the supervisor, of the API; a second server; a worker that hangs."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import processes
from tests.faults.faulty_server import LONG, MODEL, SMALL, Ending, FaultyServer
from tests.faults.writing import ENCODED, catch_writing
from tests.server.running_server import free_port

pytestmark = pytest.mark.alone

ONCE_LOST = Ending(attempt=2, losses=1)
GIVEN_BACK = Ending(attempt=2, losses=0)
WORKER_TIMEOUT_SECONDS = 5
RESUMED = SMALL | {"num_inference_steps": 20, "checkpoint_every": 5, "seed": 9}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    """A ready server that soon notices a hung worker."""
    folder: Path = tmp_path_factory.mktemp("killed")
    flags = ("--worker-timeout-seconds", str(WORKER_TIMEOUT_SECONDS))
    with FaultyServer(folder / "data", *flags) as running:
        yield running.wait_until_ready()


def start_long(server: FaultyServer, **fields: int) -> str:
    """A job in the midst of its denoise."""
    job_id = server.start(**(LONG | fields))
    processes.wait_until(lambda: server.row(job_id).step >= 2, "the job denoises")
    return job_id


def test_all_while_one_job_is_written_and_the_next_denoises(server: FaultyServer) -> None:
    undisturbed = server.start(**RESUMED)
    server.finish(undisturbed)
    first, second, queued = server.start(**ENCODED), server.start(**RESUMED), server.start(seed=4)
    worker, ffmpeg = catch_writing(server, first)
    processes.stop(ffmpeg)
    processes.go_on(worker)
    processes.wait_until(lambda: server.row(second).step >= 12, "the second job is in the midst of it")
    assert server.row(first).stage == "encode_mp4"
    server.kill_everything()
    assert [server.row(job_id).status for job_id in (first, second, queued)] == [
        *("in_progress", "in_progress", "queued")
    ]
    for job_id in (first, second):
        server.expect(job_id, ONCE_LOST)
    server.restart()
    processes.go_on(
        ffmpeg
    )  # in a session of its own: it outlived the rest, and sees the end of its input now
    processes.wait_until(lambda: processes.state(ffmpeg) in "ZX", "ffmpeg ends", 20)
    assert server.finish(first)["resumed_from_step"] == SMALL["num_inference_steps"]
    assert server.finish(second)["resumed_from_step"] in {10, 15, 20}
    assert server.video(second) == server.video(undisturbed)
    server.finish(queued)
    server.check_sound()


def test_supervisor_in_denoise(server: FaultyServer) -> None:
    job_id = start_long(server)
    supervisor, worker = server.supervisor_pid, server.worker_pid
    server.expect(job_id, ONCE_LOST)
    processes.kill(supervisor)
    processes.wait_until(lambda: processes.state(worker) in "ZX", "its worker ends with it", 10)
    server.finish(job_id)
    server.check_sound()


def test_supervisor_in_store_when_the_file_lies_there(server: FaultyServer) -> None:
    job_id = server.start(**ENCODED)
    worker, _ = catch_writing(server, job_id)
    supervisor = server.supervisor_pid
    processes.stop(supervisor)
    processes.go_on(worker)
    processes.wait_until(lambda: server.files.video(job_id, 1).exists(), "the file is at its name")
    server.expect(job_id, ONCE_LOST)  # the table knows nothing of that file
    processes.kill(supervisor)
    assert server.finish(job_id)["resumed_from_step"] == SMALL["num_inference_steps"]
    server.check_sound()


def start_second(server: FaultyServer) -> subprocess.CompletedProcess[str]:
    """Another server on the same folder."""
    serve = (sys.executable, "-m", "server.cli", "serve", "--port", str(free_port()))
    folder = ("--data-dir", str(server.data_dir), "--model", MODEL)
    return subprocess.run([*serve, *folder], capture_output=True, text=True, timeout=60)


def test_second_server_is_refused_until_the_first_ones_api_is_killed(server: FaultyServer) -> None:
    running = start_long(server, num_inference_steps=100, checkpoint_every=10)
    queued = server.start(seed=5)
    before = server.row(queued)
    second = start_second(server)
    assert second.returncode == 1
    assert f"in use by another server (process {server.pid})" in second.stderr
    assert "Traceback" not in second.stderr
    assert server.row(queued) == before
    assert server.row(running).attempt == 1

    children = (server.supervisor_pid, server.worker_pid)
    server.signal(signal.SIGKILL)
    assert server.wait_for_end() == -signal.SIGKILL
    server.expect(running, GIVEN_BACK)
    server.__enter__()  # while the children of the first one may still be there
    assert [processes.state(pid) in "ZX" for pid in children] == [True, True]
    assert server.finish(running)["resumed_from_step"] >= 10
    server.finish(queued)
    server.check_sound()


def test_hung_worker(server: FaultyServer) -> None:
    job_id = start_long(server)
    worker = server.worker_pid
    server.expect(job_id, ONCE_LOST)
    processes.stop(worker)
    server.finish(job_id)
    assert processes.state(worker) in "ZX"
    deaths = [line["cause"] for line in server.logged() if line["event"] == "worker_died"]
    assert any("no sign of life" in cause for cause in deaths)
    server.check_sound()
