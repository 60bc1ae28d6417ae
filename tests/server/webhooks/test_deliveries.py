"""Webhooks of real jobs: from a real server to a real receiver, over restarts."""

import base64
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook

from server.webhooks.deliveries import MAX_AT_ONCE, MAX_AT_ONCE_PER_SITE
from server.webhooks.sending import TIMEOUT_SECONDS
from tests.server.routes.test_videos import error_of
from tests.server.running_server import RunningServer
from tests.server.webhooks.receiver import Received, Receiver, status

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
ENV = {"REELWRIGHT_WEBHOOK_SECRET": SECRET, "REELWRIGHT_WEBHOOK_ALLOW_PRIVATE": "true"}


@pytest.fixture(scope="module")
def sending(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A ready server that sends webhooks."""
    with RunningServer(tmp_path_factory.mktemp("hooks") / "data", model_file, env=ENV) as running:
        yield running.wait_until_ready()


def message_of(received: Received) -> dict[str, Any]:
    """The message, after its signature was checked by the package of the Standard Webhooks project."""
    message = Webhook(SECRET).verify(received.body, received.headers)
    assert message == json.loads(received.body)
    return dict(message)


def pending(server: RunningServer, job_id: str) -> list[tuple[int, float]]:
    """Tries and seconds until the next one, of the job's webhooks that are not delivered."""
    with closing(sqlite3.connect(server.data_dir / "jobs.sqlite3")) as connection:
        rows = connection.execute("SELECT tries, next_try_at FROM webhooks WHERE job_id = ?", (job_id,))
        return [(tries, at - time.time()) for tries, at in rows]


def test_a_completed_job_is_told(sending: RunningServer) -> None:
    with Receiver() as receiver:
        job = sending.submit(num_inference_steps=1, webhook_url=receiver.url, metadata={"shot": "7"})
        message = message_of(receiver.wait(1)[0])
    assert message["type"] == "video.completed"
    assert message["data"] == sending.job(job["id"])
    assert message["data"]["metadata"] == {"shot": "7"}
    assert message["timestamp"].endswith("Z")
    sending.wait_for(lambda: pending(sending, job["id"]) == [])


def test_a_failed_and_a_cancelled_job_are_told(sending: RunningServer) -> None:
    with Receiver() as receiver:
        failed = sending.submit_long(webhook_url=receiver.url, deadline_seconds=0.05)["id"]
        receiver.wait(1)
        cancelled = sending.submit_long(webhook_url=receiver.url)["id"]
        sending.client.post(f"/v1/videos/{cancelled}/cancel")
        receiver.wait(2)
    messages = [message_of(received) for received in receiver.received]
    assert [(message["type"], message["data"]["id"]) for message in messages] == [
        ("video.failed", failed),
        ("video.cancelled", cancelled),
    ]
    assert messages[0]["data"]["error"]["code"] == "deadline_exceeded"


def test_a_failed_try_is_repeated_even_by_another_server(model_file: Path, tmp_path: Path) -> None:
    with Receiver(status(500), status(503), status(204)) as receiver:
        with RunningServer(tmp_path / "data", model_file, env=ENV) as server:
            server.wait_until_ready()
            job_id = server.submit(num_inference_steps=1, webhook_url=receiver.url)["id"]
            receiver.wait(1)
            server.wait_for(lambda: [tries for tries, _ in pending(server, job_id)] == [1])
            server.kill_everything()
        ((tries, seconds),) = pending(server, job_id)
        assert tries == 1
        assert 0 < seconds <= 6
        with RunningServer(tmp_path / "data", model_file, env=ENV) as server:
            receiver.wait(2)
            server.wait_for(lambda: [tries for tries, _ in pending(server, job_id)] == [2])
            ((_, seconds),) = pending(server, job_id)
            assert 290 < seconds <= 360
    first, second = receiver.received
    assert second.at - first.at >= 5
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert message_of(first) == message_of(second)


def test_a_receiver_that_never_answers_delays_no_other(sending: RunningServer) -> None:
    def told(url: str) -> str:
        job_id = str(sending.submit_long(webhook_url=url)["id"])
        sending.client.post(f"/v1/videos/{job_id}/cancel")
        return job_id

    def silence(_: BaseHTTPRequestHandler) -> None:
        over.wait()

    over = threading.Event()
    with Receiver(silence) as silent, Receiver() as receiver:
        waiting = [told(f"{silent.url}/{number}") for number in range(MAX_AT_ONCE + 4)]
        silent.wait(1)
        told(receiver.url)
        receiver.wait(1, seconds=TIMEOUT_SECONDS / 2)
        assert len(silent.received) <= MAX_AT_ONCE_PER_SITE
        over.set()
    for job_id in waiting:
        sending.client.delete(f"/v1/videos/{job_id}")


def test_a_receiver_that_is_gone_is_left_alone(sending: RunningServer) -> None:
    with Receiver(status(410)) as receiver:
        job_id = sending.submit(num_inference_steps=1, webhook_url=receiver.url)["id"]
        receiver.wait(1)
        sending.wait_for(lambda: pending(sending, job_id) == [])
    assert len(receiver.received) == 1


def test_a_deleted_job_tells_nobody_any_more(sending: RunningServer) -> None:
    with Receiver(status(500)) as receiver:
        job_id = sending.submit(num_inference_steps=1, webhook_url=receiver.url)["id"]
        receiver.wait(1)
        sending.wait_for(lambda: [tries for tries, _ in pending(sending, job_id)] == [1])
        sending.client.delete(f"/v1/videos/{job_id}")
        assert pending(sending, job_id) == []


@pytest.mark.parametrize(
    "url",
    [
        "https://localhost/hook",
        "https://127.0.0.1:8443/",
        "https://[::1]/",
        "https://[::ffff:10.0.0.1]/",
        "https://169.254.169.254/latest/meta-data",
        "https://2130706433/",
        "http://93.184.215.14/",
        "https://user:pass@93.184.215.14/",
        "https://no-such-host.invalid:x/",
        "ftp://93.184.215.14/",
        "",
    ],
)
def test_a_url_that_webhooks_do_not_go_to_is_refused(careful: RunningServer, url: str) -> None:
    answer = careful.client.post("/v1/videos", json={"prompt": "x", "webhook_url": url})
    assert error_of(answer, 400)["param"] == "webhook_url"
    assert careful.client.get("/v1/videos").json()["data"] == []


@pytest.fixture(scope="module")
def careful(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a secret and nothing more allowed."""
    env = {"REELWRIGHT_WEBHOOK_SECRET": SECRET}
    with RunningServer(tmp_path_factory.mktemp("careful") / "data", model_file, env=env) as running:
        yield running
