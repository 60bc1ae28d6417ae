"""A worker that is stopped, or has much to say, while the database is away: real processes, real kill -9."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.identity import GAP_SECONDS
from server.jobs import JobTable
from tests.faults import processes
from tests.postgres import PostgresServer
from tests.server.cluster.processes import Cluster, RunningWorker, local_cluster
from tests.server.running_server import RunningServer

pytestmark = pytest.mark.alone

SCRIPT = "denoise step until:on step checkpoint finish"
LOOK_SECONDS = 12.0  # two rounds of waiting for a connection


@pytest.fixture
def cluster(tmp_path: Path, postgres: PostgresServer) -> Iterator[Cluster]:
    """Nothing runs in it yet."""
    with postgres.database() as url, local_cluster(tmp_path, url) as made:
        yield made


def start_job(api: RunningServer, script: str = SCRIPT, **fields: float) -> str:
    """A job in the midst of its denoise."""
    job_id = str(api.submit(prompt=script, num_inference_steps=3, **fields)["id"])
    api.wait_for(lambda: api.job(job_id)["step"] == 1)
    return job_id


def losses(cluster: Cluster, job_id: str) -> int:
    """How many workers it has cost, as the table has it."""
    job = JobTable(cluster.database).find(job_id)
    assert job is not None
    return job.losses


def cpu_seconds(pid: int) -> float:
    """Of a process, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("how", ["waits", "leaves a note", "is not seen again"])
def test_a_drain_while_the_database_is_away_is_no_loss(
    cluster: Cluster, postgres: PostgresServer, how: str
) -> None:
    api = cluster.api()
    worker = cluster.worker("--drain-seconds", "0")
    cluster.wait_until_ready(worker)
    job_id = start_job(api)
    note = worker.data_dir / "drained.json"
    postgres.kill()
    try:
        processes.wait_until(lambda: "database_away" in worker.logged(), "the worker has noticed")
        worker.send(signal.SIGTERM)
        processes.wait_until(note.exists, "the worker has ended its job")
        if how != "waits":
            worker.send(signal.SIGTERM)
            assert worker.wait_for_end() == 75
        if how == "is not seen again":
            time.sleep(GAP_SECONDS + 5)  # a short outage is one that the worker waits for
        assert worker.has_ended == (how != "waits")
    finally:
        postgres.start()
    if how == "waits":
        assert worker.wait_for_end() == 0
        assert not note.exists()
        assert api.job(job_id)["status"] == "queued"
    next_one = worker
    if how == "is not seen again":
        next_one = cluster.worker()
    else:
        worker.start()
    processes.wait_until(lambda: next_one.data_dir.is_dir(), "the next worker starts")
    (next_one.data_dir / "on").touch()
    done = api.wait_for_job(job_id)
    assert (done["status"], done["attempt"], losses(cluster, job_id)) == ("completed", 2, 0)
    assert not (next_one.data_dir / "drained.json").exists()
    assert "Traceback" not in worker.logged() + api.log.read_text()


def test_an_outage_costs_no_processor_time(cluster: Cluster, postgres: PostgresServer) -> None:
    api = cluster.api()
    worker = cluster.worker()
    cluster.wait_until_ready(worker)
    job_id = start_job(api, deadline_seconds=2)
    postgres.kill()
    try:
        processes.wait_until(lambda: "database_away" in worker.logged(), "the worker has noticed")
        time.sleep(2)  # now the deadline is over, and nobody can be told
        used = look_at(worker, api)
        assert max(used) < LOOK_SECONDS / 12, used
    finally:
        postgres.start()
    assert api.wait_for_job(job_id)["error"]["code"] == "deadline_exceeded"
    assert api.log.read_text().count('"event": "database_away"') <= 2  # said once, not every second


def look_at(worker: RunningWorker, api: RunningServer) -> list[float]:
    """CPU seconds of the supervisor and of the API process during ``LOOK_SECONDS``."""
    before = [cpu_seconds(pid) for pid in (worker.pid, api.pid)]
    time.sleep(LOOK_SECONDS)
    return [cpu_seconds(pid) - then for pid, then in zip((worker.pid, api.pid), before, strict=True)]
