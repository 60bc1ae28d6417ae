"""What only several hosts have: hosts that are lost or cut off, other models, a database that goes away."""

import base64
import json
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.jobs import JobTable
from server.workers import LOST_AFTER_SECONDS
from tests.faults import processes
from tests.postgres import PostgresServer
from tests.server.cluster.processes import Cluster, RunningWorker, local_cluster, stored
from tests.server.running_server import RunningServer
from tests.server.scripted_worker import LOAD_FAILS
from tests.server.webhooks.receiver import Receiver

pytestmark = pytest.mark.alone

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
HOOKS = {"REELWRIGHT_WEBHOOK_SECRET": SECRET, "REELWRIGHT_WEBHOOK_ALLOW_PRIVATE": "true"}


@pytest.fixture
def cluster(tmp_path: Path, postgres: PostgresServer) -> Iterator[Cluster]:
    """Nothing runs in it yet."""
    with postgres.database() as url, local_cluster(tmp_path, url) as made:
        yield made


def holder(cluster: Cluster, job_id: str, *workers: RunningWorker) -> RunningWorker:
    """The worker that has the job."""
    job = JobTable(cluster.database).find(job_id)
    assert job is not None
    return next(worker for worker in workers if worker.name == job.worker)


def start_job(api: RunningServer, prompt: str) -> str:
    """A job in the midst of its denoise."""
    job_id = str(api.submit(prompt=prompt, num_inference_steps=3)["id"])
    api.wait_for(lambda: api.job(job_id)["step"] == 1)
    return job_id


def test_a_lost_host_and_one_that_was_cut_off(cluster: Cluster, tmp_path: Path) -> None:
    api = cluster.api()
    pair = (cluster.worker(), cluster.worker())
    cluster.wait_until_ready(*pair)
    lost_job = start_job(api, "denoise step until:here finish")
    cut_job = start_job(api, "denoise step until:here finish")
    lost, cut = (holder(cluster, job, *pair) for job in (lost_job, cut_job))
    assert lost is not cut
    lost.kill()
    cut.send_all(signal.SIGSTOP)
    other = cluster.worker()
    other.data_dir.mkdir(exist_ok=True)
    (other.data_dir / "here").touch()
    for job_id in (lost_job, cut_job):
        done = api.wait_for_job(job_id)
        assert (done["status"], done["attempt"]) == ("completed", 2)
        assert api.client.get(f"/v1/videos/{job_id}/content").content == b"whole"
    silent = cluster.rows()[cut.name]
    assert silent.heartbeat_age_seconds >= LOST_AFTER_SECONDS
    assert not silent.is_ready

    # The one that was only cut off finds its claim lost, ends that job and goes on with others.
    (cut.data_dir / "here").touch()
    cut.send_all(signal.SIGCONT)
    processes.wait_until(lambda: cluster.rows()[cut.name].is_ready, "it is back")
    processes.wait_until(lambda: "job_cancelling" in cut.logged(), "it knows that its claim is lost")
    other.kill()
    next_job = str(api.submit(prompt="denoise finish", num_inference_steps=3)["id"])
    assert api.wait_for_job(next_job)["attempt"] == 1
    # At once, not by a sweep an hour later: what the cut-off attempt left is gone, here and in the store.
    wanted = sorted(
        f"videos/{job_id}/{attempt}{ending}"
        for job_id, attempt in ((lost_job, 2), (cut_job, 2), (next_job, 1))
        for ending in (".mp4", ".thumbnail.jpg")
    )
    processes.wait_until(lambda: stored(tmp_path) == wanted, f"the store has {wanted}")
    processes.wait_until(lambda: not list((cut.data_dir / "videos").iterdir()), "its scratch folder is empty")


def test_models_ready_and_webhooks(cluster: Cluster) -> None:
    cluster.env = HOOKS
    first, second = cluster.api(), cluster.api()
    ready = first.client.get("/health/ready")
    assert ready.status_code == 503
    assert "no worker of model reelwright-shapes is up" in ready.json()["reason"]
    with Receiver() as receiver:
        ids = {str(first.submit(prompt="denoise finish", webhook_url=receiver.url)["id"]) for _ in range(20)}
        stranger = cluster.worker(model="wan2.1-t2v-1.3b")
        cluster.wait_until_ready(stranger)
        assert first.client.get("/health/ready").status_code == 503
        metrics = second.client.get("/metrics").text
        assert 'reelwright_worker_up{model="reelwright-shapes"} 0.0' in metrics
        assert 'reelwright_worker_up{model="wan2.1-t2v-1.3b"} 1.0' in metrics
        assert 'reelwright_jobs_queued{model="reelwright-shapes"} 20.0' in metrics

        workers = [cluster.worker(), cluster.worker()]
        cluster.wait_until_ready(*workers)
        assert second.client.get("/health/ready").status_code == 200
        assert 'reelwright_worker_up{model="reelwright-shapes"} 2.0' in first.client.get("/metrics").text
        stats = second.client.get("/v1/stats")
        assert stats.status_code == 200, stats.text
        (model,) = stats.json()["models"]
        assert {worker["name"] for worker in model["workers"]} == {worker.name for worker in workers}
        receiver.wait(20)
        delivered = 'reelwright_webhooks_total{result="delivered"} 20.0'
        second.wait_for(lambda: delivered in second.client.get("/metrics").text)
        told = Counter(json.loads(message.body)["data"]["id"] for message in receiver.received)
        assert told == Counter(ids)
    assert "job_started" not in stranger.logged()

    # A host that cannot load the model leaves the jobs to those that can.
    cluster.worker(env={LOAD_FAILS: "1"})
    processes.wait_until(
        lambda: "load_failed" in {row.state for row in cluster.rows().values()}, "it knows that it cannot"
    )
    later = [str(first.submit(prompt="denoise pause finish")["id"]) for _ in range(10)]
    assert [second.wait_for_job(job_id)["status"] for job_id in later] == ["completed"] * 10
    for worker in workers:
        worker.kill()
    lost = str(first.submit(prompt="denoise finish")["id"])
    second.wait_for(
        lambda: second.job(lost)["status"] == "failed", seconds=300
    )  # nobody else is left, for long
    assert second.job(lost)["error"]["code"] == "model_load_failed"


def test_the_database_is_killed_in_the_middle_of_jobs(cluster: Cluster, postgres: PostgresServer) -> None:
    api = cluster.api()
    worker = cluster.worker()
    cluster.wait_until_ready(worker)
    pid = cluster.worker_pid(worker)
    job_id = start_job(api, "denoise step until:dark preview step until:light finish")
    queued = str(api.submit(prompt="denoise finish", num_inference_steps=3)["id"])
    seen: list[str] = []

    def watch() -> None:
        with httpx.stream("GET", f"{api.url}/v1/videos/{job_id}/events", timeout=120) as stream:
            seen.extend(line for line in stream.iter_lines() if line.startswith("event: "))

    watcher = threading.Thread(target=watch)
    watcher.start()
    api.wait_for(lambda: "event: snapshot" in seen)
    postgres.kill()
    try:
        processes.wait_until(lambda: "database_away" in worker.logged(), "the worker has noticed")
        (worker.data_dir / "dark").touch()  # the job computes on
        for method, path in (("POST", "/v1/videos"), ("GET", f"/v1/videos/{job_id}"), ("GET", "/v1/videos")):
            answer = api.client.request(method, path, json={"prompt": "x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
            assert int(answer.headers["retry-after"]) > 0
        assert api.client.get("/health/live").status_code == 200
        assert "the database does not answer" in api.client.get("/health/ready").json()["reason"]
    finally:
        postgres.start()
    (worker.data_dir / "light").touch()
    done = api.wait_for_job(job_id)
    assert (done["status"], done["attempt"]) == ("completed", 1)
    assert api.wait_for_job(queued)["status"] == "completed"
    watcher.join(60)
    assert seen[-1] == "event: completed"
    assert cluster.worker_pid(worker) == pid  # the model was not loaded again
    assert "database_back" in worker.logged()
    assert "Traceback" not in worker.logged() + api.log.read_text()
