"""Jobs belong to the key that made them, and keys share one queue within their limits."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.job import new_job_id
from tests.server.routes.test_stats import samples
from tests.server.routes.test_videos import error_of
from tests.server.running_server import RunningServer

ALICE, BOB, CAROL = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob", "carol"))
DIGESTS = ",".join(hashlib.sha256(name.encode()).hexdigest() for name in ("alice", "bob", "carol"))
ROUTES = [
    ("GET", ""),
    ("GET", "/content"),
    ("HEAD", "/content"),
    ("GET", "/content?variant=thumbnail"),
    ("GET", "/content?variant=spritesheet"),
    ("GET", "/content?variant=preview"),
    ("GET", "/events"),
    ("GET", "/manifest"),
    ("POST", "/cancel"),
    ("DELETE", ""),
]
LONG = {"prompt": "a red circle", "num_inference_steps": 1000, "size": "128x128"}


@pytest.fixture(scope="module")
def shared(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of three keys, with room for three waiting jobs, two unfinished ones of each key."""
    env = {
        "REELWRIGHT_API_KEYS_SHA256": DIGESTS,
        "REELWRIGHT_MAX_QUEUED_JOBS": "3",
        "REELWRIGHT_MAX_JOBS_PER_KEY": "2",
        "REELWRIGHT_OPEN_METRICS": "true",
    }
    with RunningServer(tmp_path_factory.mktemp("shared_keys") / "data", model_file, env=env) as server:
        yield server.wait_until_ready()


def submit(client: httpx.Client, who: dict[str, str], **headers: str) -> httpx.Response:
    """Submit a job of about a minute."""
    return client.post("/v1/videos", json=LONG, headers=who | headers)


def ids_of(client: httpx.Client, who: dict[str, str]) -> list[str]:
    """What the key's list shows."""
    return [video["id"] for video in client.get("/v1/videos", headers=who).json()["data"]]


def rejections(client: httpx.Client, reason: str) -> float:
    """How many submissions were refused for that."""
    return samples(client).get(("reelwright_jobs_rejected_total", (("reason", reason),)), 0.0)


def test_another_keys_job_is_like_no_job(shared: RunningServer) -> None:
    client = shared.client
    body = {"prompt": "a red circle", "num_inference_steps": 2}
    job_id = client.post("/v1/videos", json=body, headers=ALICE).json()["id"]
    shared.wait_for(lambda: client.get(f"/v1/videos/{job_id}", headers=ALICE).json()["progress"] == 100)
    for method, path in ROUTES:
        theirs, nobodys = (
            client.request(method, f"/v1/videos/{video_id}{path}", headers=BOB)
            for video_id in (job_id, new_job_id())
        )
        assert theirs.status_code == nobodys.status_code == 404, (method, path)
        if method != "HEAD":
            assert theirs.json()["error"]["code"] == nobodys.json()["error"]["code"] == "not_found"
    assert ids_of(client, BOB) == []
    assert ids_of(client, ALICE) == [job_id]
    for method, path in ROUTES:
        if "preview" not in path:  # there may be none of so short a job
            assert client.request(method, f"/v1/videos/{job_id}{path}", headers=ALICE).status_code == 200, (
                path
            )
    assert ids_of(client, ALICE) == []


def test_a_full_queue_says_when_to_come_back(shared: RunningServer) -> None:
    client = shared.client
    running, waiting = (submit(client, ALICE, **{"idempotency-key": key}) for key in ("1", "2"))
    assert (running.status_code, waiting.status_code) == (202, 202)
    running_id = running.json()["id"]
    shared.wait_for(lambda: client.get(f"/v1/videos/{running_id}", headers=ALICE).json()["step"] >= 2)

    refused = submit(client, ALICE)
    error = error_of(refused, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "quota_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 3600

    theirs = [submit(client, BOB, **{"idempotency-key": key}) for key in ("1", "2")]
    assert [answer.status_code for answer in theirs] == [202, 202]
    assert len({answer.json()["id"] for answer in (running, waiting, *theirs)}) == 4
    refused = submit(client, CAROL)
    assert error_of(refused, 429)["code"] == "queue_full"
    assert 1 <= int(refused.headers["retry-after"]) <= 3600
    assert (rejections(client, "quota_exceeded"), rejections(client, "queue_full")) == (1, 1)

    repeated = submit(client, ALICE, **{"idempotency-key": "2"})
    assert (repeated.status_code, repeated.json()["id"]) == (200, waiting.json()["id"])
    # Positions count everybody's jobs; the waiting one moves back for nobody of its own priority.
    assert [answer.json()["queue_position"] for answer in (waiting, *theirs)] == [1, 2, 3]

    assert client.post(f"/v1/videos/{waiting.json()['id']}/cancel", headers=ALICE).status_code == 200
    assert submit(client, CAROL).status_code == 202


def test_jobs_of_a_server_without_keys_are_no_keys(model_file: Path, tmp_path: Path) -> None:
    with RunningServer(tmp_path / "data", model_file) as server:
        job_id = server.submit()["id"]
    env = {"REELWRIGHT_API_KEYS_SHA256": DIGESTS, "REELWRIGHT_RETENTION_SECONDS": "1"}
    with RunningServer(tmp_path / "data", model_file, env=env) as server:
        assert error_of(server.client.get(f"/v1/videos/{job_id}", headers=ALICE), 404)
        assert ids_of(server.client, ALICE) == []
        mine = submit(server.client, ALICE).json()
        assert mine["expires_at"] is None
        ended = server.client.post(f"/v1/videos/{mine['id']}/cancel", headers=ALICE).json()
        assert ended["status"] == "cancelled"
        assert ended["expires_at"] - ended["completed_at"] in {1, 2}
        time.sleep(1.1)
        assert error_of(server.client.get(f"/v1/videos/{mine['id']}", headers=ALICE), 404)
    with RunningServer(tmp_path / "data", model_file) as server:
        assert server.job(job_id)["id"] == job_id
