"""Dead workers, dead servers and models that do not load: real processes, real SIGKILL."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from configs.model_preset import ModelPreset
from server.database import SqliteDatabase
from server.job import Job
from server.jobs import JobTable
from tests.server.running_server import RunningServer, members


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data folder of the test's own."""
    return tmp_path / "data"


def is_gone(pid: int) -> bool:
    """Whether the process has ended (or is a zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def results(*attempts: str) -> list[str]:
    """The files of completed attempts."""
    return sorted(
        f"{attempt}{suffix}"
        for attempt in attempts
        for suffix in (".mp4", ".spritesheet.jpg", ".thumbnail.jpg")
    )


def files_of(server: RunningServer) -> list[str]:
    """Every file below the video folder."""
    root = server.data_dir / "videos"
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def kill_worker_at(server: RunningServer, job_id: str, attempt: int) -> None:
    """SIGKILL the worker in the middle of that attempt's denoise."""
    server.wait_for(lambda: server.job(job_id)["attempt"] == attempt)
    server.wait_for_step(job_id)
    os.kill(server.worker()["worker_pid"], signal.SIGKILL)


def test_a_killed_workers_job_runs_again_and_a_second_death_fails_it(
    data_dir: Path, model_file: Path
) -> None:
    with RunningServer(data_dir, model_file, "--drain-seconds", "0") as server:
        server.wait_until_ready()
        once, twice = server.submit_long()["id"], server.submit_long()["id"]
        kill_worker_at(server, once, 1)
        again = server.wait_for_job(once)
        assert (again["status"], again["attempt"], again["error"]) == ("completed", 2, None)

        kill_worker_at(server, twice, 1)
        kill_worker_at(server, twice, 2)
        failed = server.wait_for_job(twice)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "worker_lost")
        assert failed["error"]["retryable"]
        assert "SIGKILL" in failed["error"]["message"]
        assert failed["completed_at"] is not None

        assert files_of(server) == results(f"{once}/2")
        assert server.log.read_text().count("worker_died") == 3

        # With no drain time, SIGTERM queues the running job again at once; that is no loss of its worker.
        drained = server.submit_long()["id"]
        server.wait_for_step(drained)
        with server.client.stream("GET", f"/v1/videos/{drained}/events") as events:
            server.signal(signal.SIGTERM)
            assert "event: completed" not in events.read().decode()
        assert server.wait_for_end() == 0
        server.wait_until_nothing_runs()
        job = read_job(data_dir, drained)
        assert (job.status, job.attempt, job.losses) == ("queued", 1, 0)


def test_jobs_survive_the_death_of_everything(data_dir: Path, model_file: Path) -> None:
    with RunningServer(data_dir, model_file) as server:
        server.wait_until_ready()
        done = server.submit()["id"]
        server.wait_for_job(done, "completed")
        running, queued = server.submit_long(seed=4)["id"], server.submit(seed=5)["id"]
        server.wait_for_step(running)
        server.kill_everything()
    (data_dir / "videos" / running / ".1.0a.tmp.mp4").write_bytes(b"half a video")
    with RunningServer(data_dir, model_file) as server:
        assert server.client.get(f"/v1/videos/{done}/content").status_code == 200
        first = server.wait_for_job(running)
        second = server.wait_for_job(queued)
        assert first["metrics"]["load_seconds"] > 0  # it waited for the model of the new server
        assert second["metrics"]["load_seconds"] == 0
        assert (first["status"], first["attempt"], first["seed"]) == ("completed", 2, 4)
        assert (second["status"], second["attempt"], second["seed"]) == ("completed", 1, 5)
        assert first["started_at"] <= second["started_at"]
        assert files_of(server) == results(f"{done}/1", f"{running}/2", f"{queued}/1")

        # The API process sees its supervisor die and starts another; the worker goes with the old one.
        job_id = server.submit_long()["id"]
        server.wait_for_step(job_id)
        before = server.worker()
        os.kill(before["supervisor_pid"], signal.SIGKILL)
        server.wait_for(lambda: is_gone(before["worker_pid"]))
        server.wait_for(lambda: server.client.get("/health/ready").status_code == 503)
        server.wait_until_ready()
        assert server.worker()["worker_pid"] not in {None, before["worker_pid"]}
        again = server.wait_for_job(job_id)
        assert (again["status"], again["attempt"]) == ("completed", 2)
        assert server.worker()["supervisor_pid"] != before["supervisor_pid"]

        # And nothing outlives a killed API process.
        last = server.submit_long()["id"]
        server.wait_for_step(last)
        assert len(members(server.pid)) >= 3
        os.kill(server.pid, signal.SIGKILL)
        server.wait_for_end()
        server.wait_until_nothing_runs()
        assert read_job(data_dir, last).status == "queued"


def read_job(data_dir: Path, job_id: str) -> Job:
    """The job in the table of a server that has ended."""
    database = SqliteDatabase(data_dir / "jobs.sqlite3")
    job = JobTable(database).get(job_id)
    database.close()
    assert job is not None
    return job


def test_a_model_that_cannot_load_fails_its_jobs_and_says_why(
    data_dir: Path, preset: ModelPreset, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(preset.source, broken)
    weights = next((broken / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    with RunningServer(data_dir, broken) as server:
        failed = server.wait_for_job(server.submit(size="64x64", num_frames=9)["id"])
        assert (failed["status"], failed["error"]["code"]) == ("failed", "model_load_failed")
        assert "transformer" in failed["error"]["message"]
        ready = server.client.get("/health/ready")
        assert ready.status_code == 503
        assert "load_failed" in ready.json()["reason"]
        assert "transformer" in ready.json()["reason"]
        assert server.client.get("/health/live").status_code == 200
        second = server.wait_for_job(server.submit(size="64x64", num_frames=9)["id"])
        assert second["error"]["code"] == "model_load_failed"


def test_a_failed_job_leaves_the_worker_fit(server: RunningServer) -> None:
    pid = server.worker()["worker_pid"]
    # The model has two layers, which only the worker knows.
    failed = server.wait_for_job(server.submit(attention={"dense_layers": [99]})["id"])
    assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_input")
    assert "99" in failed["error"]["message"]
    done = server.wait_for_job(server.submit()["id"])
    assert (done["status"], done["error"]) == ("completed", None)
    assert server.worker()["worker_pid"] == pid
