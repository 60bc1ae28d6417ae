"""Starting and stopping the server."""

import json
import signal
import socket
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.routes.test_videos import error_of
from tests.server.running_server import RunningServer, free_port
from tests.server.test_cli import run
from tests.server.test_supervisor import read_job


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data folder of the test's own."""
    return tmp_path / "data"


def maps(pid: int) -> str:
    """The files mapped into a process."""
    return Path(f"/proc/{pid}/maps").read_text()


def start_in_vain(model: Path, data_dir: Path, port: int) -> subprocess.CompletedProcess[str]:
    """Run the command where it cannot start."""
    return run("serve", "--port", str(port), "--data-dir", str(data_dir), "--model", str(model))


def test_only_the_worker_process_has_torch(server: RunningServer) -> None:
    worker = server.worker()
    assert "libtorch" in maps(worker["worker_pid"])
    for pid in (server.pid, worker["supervisor_pid"]):
        assert "libtorch" not in maps(pid)


def test_sigterm_finishes_the_running_job_and_stops_taking_new_ones(data_dir: Path, model_file: Path) -> None:
    with RunningServer(data_dir, model_file) as server:
        server.wait_until_ready()
        running, queued = server.submit_long()["id"], server.submit()["id"]
        server.wait_for_step(running)
        with server.client.stream("GET", f"/v1/videos/{running}/events") as events:
            server.signal(signal.SIGTERM)
            server.wait_for(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
            assert "draining" in httpx.get(f"{server.url}/health/ready").json()["reason"]
            refused = httpx.post(f"{server.url}/v1/videos", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert "event: completed" in events.read().decode()
        assert server.wait_for_end() == 0
        server.wait_until_nothing_runs()
        assert server.log.read_text().count("job_started") == 1
    with RunningServer(data_dir, model_file, "--drain-seconds", "600") as server:
        assert server.job(running)["status"] == "completed"
        assert server.wait_for_job(queued)["status"] == "completed"
        # A second signal ends a drain that takes too long.
        interrupted = server.submit_long()["id"]
        server.wait_for_step(interrupted)
        server.signal(signal.SIGTERM)
        server.wait_for(lambda: server.client.get("/health/ready").status_code == 503)
        assert server.job(interrupted)["status"] == "in_progress"
        server.signal(signal.SIGINT)
        assert server.wait_for_end() == 0
        server.wait_until_nothing_runs()
        assert read_job(data_dir, interrupted).status == "queued"
        assert "Traceback" not in server.log.read_text()


def test_a_second_server_on_the_same_folder_is_refused(server: RunningServer, model_file: Path) -> None:
    ended = run(
        "serve", "--port", str(free_port()), "--data-dir", str(server.data_dir), "--model", str(model_file)
    )
    assert ended.returncode == 1
    assert f"in use by another server (process {server.pid})" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_taken_port_is_one_readable_line(data_dir: Path, model_file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        ended = start_in_vain(model_file, data_dir, port)
    assert ended.returncode == 1
    assert f"port {port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_data_folder_that_cannot_be_made_is_one_readable_line(tmp_path: Path, model_file: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "data"
    ended = start_in_vain(model_file, folder, free_port())
    assert ended.returncode == 1
    assert str(folder) in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_address_that_does_not_resolve_is_one_readable_line(data_dir: Path, model_file: Path) -> None:
    ended = run(
        *("serve", "--host", "no.such.host.invalid", "--allow-unauthenticated"),
        *("--data-dir", str(data_dir), "--model", str(model_file)),
    )
    assert ended.returncode == 1
    assert "no.such.host.invalid" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_database_that_cannot_be_used_is_503_and_works_again(data_dir: Path, model_file: Path) -> None:
    with RunningServer(data_dir, model_file) as server:
        with closing(sqlite3.connect(data_dir / "jobs.sqlite3")) as database:
            database.execute("ALTER TABLE jobs RENAME TO away")
            for method, path in (("POST", "/v1/videos"), ("GET", "/v1/videos"), ("DELETE", "/v1/videos/x")):
                answer = server.client.request(method, path, json={"prompt": "x"})
                assert error_of(answer, 503)["code"] == "database_unavailable"
                assert int(answer.headers["retry-after"]) > 0
            server.wait_for(lambda: "supervisor_died" in server.log.read_text())
            database.execute("ALTER TABLE away RENAME TO jobs")
        assert server.wait_for_job(server.submit()["id"])["status"] == "completed"
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x"])
def test_a_client_that_goes_away_while_sending_is_no_error(server: RunningServer, kind: str) -> None:
    request_id = f"gone-{kind[:9]}"
    head = (
        f"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: {request_id}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: 1000\r\n\r\n--x"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode())

    def lines() -> list[dict[str, Any]]:
        logged = (json.loads(line) for line in server.log.read_text().splitlines() if request_id in line)
        return list(logged)

    server.wait_for(lambda: bool(lines()))
    assert [(line["event"], line["status"]) for line in lines()] == [("request", 499)]


def test_logs_bind_the_job_and_hold_no_prompt(server: RunningServer) -> None:
    job_id = server.submit(prompt="an unmistakable heptagon")["id"]
    server.wait_for_job(job_id, "completed")
    log = server.log.read_text()
    assert [line for line in log.splitlines() if job_id in line and "job_completed" in line]
    assert "heptagon" not in log
