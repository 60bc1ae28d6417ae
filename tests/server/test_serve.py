"""Starting and stopping the server."""

import hashlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from server.serve import CLOSE_SECONDS
from server.supervisor_handle import STOP_GRACE_SECONDS
from tests.server.routes.test_videos import error_of
from tests.server.running_server import RunningServer, free_port
from tests.server.samples import UNKNOWN_ID
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


def is_draining(server: RunningServer) -> bool:
    """Whether the server says that it is about to end."""
    answer = server.client.get("/health/ready")
    return answer.status_code == 503 and "draining" in answer.json()["reason"]


def start_long_job(server: RunningServer) -> str:
    """Submit a job that takes several seconds, and wait until it is in the middle of its denoise."""
    job_id = str(server.submit(num_inference_steps=500, size="128x128")["id"])
    server.wait_for_step(job_id)
    return job_id


def test_first_signal_ends_streams_refuses_jobs_and_lets_the_running_one_finish(
    data_dir: Path, model_file: Path
) -> None:
    with RunningServer(data_dir, model_file, "--drain-seconds", "120") as server:
        server.wait_until_ready()
        done = server.wait_for_job(server.submit()["id"])
        running, queued = start_long_job(server), server.submit()["id"]
        with server.client.stream("GET", f"/v1/videos/{running}/events") as events:
            server.signal(signal.SIGTERM)
            seen = "".join(events.iter_text())  # raises where the stream is cut and not ended
        assert "event: snapshot" in seen
        assert "event: completed" not in seen
        assert is_draining(server)
        refused = server.client.post("/v1/videos", json={"prompt": "x"})
        assert error_of(refused, 503)["code"] == "draining"
        assert int(refused.headers["retry-after"]) > 0
        with server.client.stream("GET", f"/v1/videos/{running}/events") as late:
            assert "event: completed" not in "".join(late.iter_text())
        content = server.client.get(f"/v1/videos/{done['id']}/content")
        assert hashlib.sha256(content.content).hexdigest() == done["file"]["sha256"]
        assert server.client.get("/v1/videos").status_code == 200
        assert server.job(running)["status"] == "in_progress"
        assert server.wait_for_end() == 0
        server.wait_until_nothing_runs()
        assert server.log.read_text().count("job_started") == 2
        assert "Traceback" not in server.log.read_text()
    assert read_job(data_dir, running).status == "completed"
    with RunningServer(data_dir, model_file) as server:
        assert server.wait_for_job(queued)["status"] == "completed"


def test_a_job_that_outlasts_the_drain_is_queued_again(data_dir: Path, model_file: Path) -> None:
    with RunningServer(data_dir, model_file, "--drain-seconds", "0.3") as server:
        server.wait_until_ready()
        job_id = start_long_job(server)
        server.signal(signal.SIGINT)
        assert server.wait_for_end() == 0
        server.wait_until_nothing_runs()
        assert "Traceback" not in server.log.read_text()
    assert read_job(data_dir, job_id).status == "queued"
    with RunningServer(data_dir, model_file) as server:
        assert server.wait_for_job(job_id)["status"] == "completed"


def test_second_signal_ends_the_drain_and_loses_no_job(data_dir: Path, model_file: Path) -> None:
    with RunningServer(data_dir, model_file, "--drain-seconds", "600") as server:
        server.wait_until_ready()
        job_id = start_long_job(server)
        server.signal(signal.SIGTERM)
        server.wait_for(lambda: is_draining(server))
        assert server.job(job_id)["status"] == "in_progress"
        server.signal(signal.SIGINT)
        assert server.wait_for_end(20) == 0
        server.wait_until_nothing_runs()
        assert "Traceback" not in server.log.read_text()
    assert read_job(data_dir, job_id).status == "queued"


@pytest.mark.alone  # within a time that a busy machine may not keep
def test_second_signal_does_not_wait_for_a_slow_client(data_dir: Path, model_file: Path) -> None:
    head = (
        b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9"
    )
    with (
        RunningServer(data_dir, model_file) as server,
        socket.create_connection(("127.0.0.1", server.port)) as slow,
    ):
        server.wait_until_ready()
        slow.sendall(head + b"\r\n\r\n{")
        server.wait_for(lambda: server.client.get("/health/live").status_code == 200)
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGINT)
        assert server.wait_for_end(CLOSE_SECONDS) == 0
        log = server.log.read_text()
        assert "answer_cut" in log
        assert slow.recv(1000).startswith(b"HTTP/1.1 503")
        assert "Traceback" not in log


@pytest.mark.alone  # within a time that a busy machine may not keep
def test_third_signal_kills_and_loses_no_job(data_dir: Path, model_file: Path) -> None:
    with RunningServer(data_dir, model_file, "--drain-seconds", "600") as server:
        supervisor = server.wait_until_ready().worker()["supervisor_pid"]
        job_id = start_long_job(server)
        server.signal(signal.SIGTERM)
        server.wait_for(lambda: is_draining(server))
        os.kill(supervisor, signal.SIGSTOP)  # so that the end in order takes long
        server.signal(signal.SIGTERM)
        server.wait_for(lambda: "drain_ended_by_signal" in server.log.read_text())
        server.signal(signal.SIGTERM)
        assert server.wait_for_end(STOP_GRACE_SECONDS / 2) == 128 + signal.SIGTERM
        os.kill(supervisor, signal.SIGCONT)
        server.wait_until_nothing_runs()
    assert read_job(data_dir, job_id).status == "queued"


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
            for method, path in (
                ("POST", "/v1/videos"),
                ("GET", "/v1/videos"),
                ("DELETE", f"/v1/videos/{UNKNOWN_ID}"),
            ):
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


def provoke(server: RunningServer, word: str) -> str:
    """Send ``word`` into every kind of trouble that a prompt can meet. Returns the id of the finished job."""
    server.wait_until_ready()
    fields: dict[str, Any] = {
        "prompt": f"an unmistakable {word}",
        "negative_prompt": f"no {word}",
        "num_inference_steps": 2,
    }
    long = fields | {"num_inference_steps": 900, "size": "128x128"}
    kind = {"Content-Type": "application/json"}
    for body in (f'{{"prompt": "{word}", "prompt": ', f'{{"prompt": 1, "{word}": 1}}', f'"{word}"', word):
        assert server.client.post("/v1/videos", content=body, headers=kind).status_code == 400
    for form in ({"prompt": word, "seed": word}, {f"a[{word}": "1"}, {"prompt": word, "size": word}):
        files = {name: (None, value) for name, value in form.items()}
        assert server.client.post("/v1/videos", files=files).status_code == 400
    key = {"Idempotency-Key": "once"}
    assert server.client.post("/v1/videos", json=fields, headers=key).status_code == 202
    assert server.client.post("/v1/videos", json=fields | {"seed": 2}, headers=key).status_code == 422
    cancelled = server.submit(**long)["id"]
    server.wait_for_step(cancelled)
    server.client.post(f"/v1/videos/{cancelled}/cancel")
    server.wait_for_job(cancelled, "cancelled")
    lost = server.submit(**long)["id"]
    server.wait_for_step(lost)
    os.kill(server.worker()["worker_pid"], signal.SIGKILL)
    server.wait_for(lambda: server.job(lost)["status"] == "queued" or server.job(lost)["step"] == 0)
    server.client.delete(f"/v1/videos/{lost}")
    blocked = server.submit(**fields)["id"]
    folder = server.data_dir / "videos" / blocked
    with suppress(OSError):
        folder.write_text("in the way")
    server.wait_for_job(blocked)
    return str(server.wait_for_job(server.submit(**fields)["id"], "completed")["id"])


def test_logs_are_lines_that_bind_the_job_and_hold_no_prompt(data_dir: Path, model_file: Path) -> None:
    with RunningServer(data_dir, model_file, "--log-level", "debug") as server:
        job_id = provoke(server, "heptagon")
        server.signal(signal.SIGTERM)
        assert server.wait_for_end() == 0
        server.wait_until_nothing_runs()
        log = server.log.read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    assert "heptagon" not in log
    assert {line["process"] for line in lines} == {"api", "supervisor", "worker"}
    events = {line["event"] for line in lines}
    assert {"job_started", "job_lost", "job_cancelled", "worker_died", "job_failed"} <= events
    assert all(line["request"] for line in lines if line["event"] == "request")
    own = [line for line in lines if line.get("job") == job_id and line["process"] == "supervisor"]
    assert [own[0]["event"], own[-1]["event"]] == ["job_started", "job_completed"]


def test_prompts_are_logged_where_asked_for_in_one_line_of_a_job(data_dir: Path, model_file: Path) -> None:
    with RunningServer(data_dir, model_file, "--log-prompts") as asked:
        job_id = asked.submit(prompt="an unmistakable heptagon")["id"]
        asked.wait_for_job(job_id, "completed")
        (line,) = [json.loads(line) for line in asked.log.read_text().splitlines() if "heptagon" in line]
    assert (line["event"], line["job"], line["prompt"]) == ("job_started", job_id, "an unmistakable heptagon")
