"""Workers of the same model with other numbers of GPUs: each takes the jobs that were put for as many."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server.jobs import JobTable
from tests.faults import processes
from tests.postgres import PostgresServer
from tests.server.cluster.processes import Cluster, RunningWorker, local_cluster
from tests.server.cluster.site import events
from tests.server.running_server import RunningServer

pytestmark = pytest.mark.alone


@pytest.fixture
def cluster(tmp_path: Path, postgres: PostgresServer) -> Iterator[Cluster]:
    """Nothing runs in it yet."""
    with postgres.database() as url, local_cluster(tmp_path, url) as made:
        yield made


def runs_on(cluster: Cluster, api: RunningServer, worker: RunningWorker) -> bool:
    """Whether the jobs of an API process are those of the worker."""
    job_id = str(api.submit(prompt="denoise finish")["id"])
    assert api.wait_for_job(job_id)["status"] == "completed"
    job = JobTable(cluster.database).find(job_id)
    assert job is not None
    return job.worker == worker.name


def test_jobs_wait_for_workers_with_as_many_gpus(cluster: Cluster) -> None:
    one, two = cluster.api(), cluster.api("--gpus", "2")
    of_one = cluster.worker()
    cluster.wait_until_ready(of_one)
    assert one.client.get("/health/ready").status_code == 200
    ready = two.client.get("/health/ready")
    assert ready.status_code == 503
    assert "no worker of model reelwright-shapes on 2 GPUs is up" in ready.json()["reason"]
    waiting = str(two.submit(prompt="denoise finish")["id"])
    assert runs_on(cluster, one, of_one)  # though another job waits longer
    found = two.job(waiting)
    reason = "no worker of model reelwright-shapes on 2 GPUs is up; those that are up have 1 GPU"
    assert (found["status"], found["queue_position"], found["waiting_reason"]) == ("queued", 1, reason)
    assert reason in two.client.post("/v1/videos/estimate", json={"prompt": "x"}).json()["warnings"]
    for api in (one, two):  # whoever looks after the cluster sees it, wherever they look
        (warning,) = api.client.get("/health").json()["warnings"]
        assert warning == f"1 queued job waits: {reason}"
        (queue,) = api.client.get("/v1/stats").json()["models"][0]["queues"]
        assert (queue["gpus"], queue["queued"], queue["workers"]) == (2, 1, 0)
        assert queue["waiting_reason"] == reason
        unserved = 'reelwright_jobs_unserved{gpus="2",model="reelwright-shapes"} 1.0'
        assert unserved in api.client.get("/metrics").text
    processes.wait_until(lambda: "jobs_wait_for_no_worker" in of_one.logged(), "a log says it")
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(events, two, waiting)
        of_two = cluster.worker("--gpus", "2")
        assert two.wait_for_job(waiting)["status"] == "completed"
        assert stream.result()[-1][0] == "completed"
    assert one.client.get("/health").json()["warnings"] == []
    assert runs_on(cluster, two, of_two)
    assert runs_on(cluster, one, of_one)
