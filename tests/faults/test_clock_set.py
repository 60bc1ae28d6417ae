"""The wall clock is set in the midst of jobs, a day forwards and two days back.

An ordinary user cannot set a machine's clock, so the server's processes get an adjustable ``time.time``
before anything else runs in them; all else in them is real. ``datetime.now``, which only log lines use,
and the file system's times stay right.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import processes
from tests.faults.faulty_server import LONG, FaultyServer

pytestmark = pytest.mark.alone

DAY_SECONDS = 24 * 3600
CLOCK = Path(__file__).parent / "clock"


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that holds the seconds by which the server's clock is wrong."""
    return tmp_path_factory.mktemp("clock") / "wrong-by-seconds"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, clock: Path) -> Iterator[FaultyServer]:
    """A server whose clock can be set."""
    path = os.pathsep.join(filter(None, (str(CLOCK), os.environ.get("PYTHONPATH"))))
    env = {"PYTHONPATH": path, "TEST_CLOCK_FILE": str(clock)}
    with FaultyServer(tmp_path_factory.mktemp("faults") / "data", env=env) as running:
        yield running.wait_until_ready()


def put_wrong(clock: Path, seconds: int) -> None:
    """Set the server's clock, at once for all its processes."""
    new = clock.with_suffix(".new")
    new.write_text(str(seconds), encoding="ascii")
    new.replace(clock)


def go_on(server: FaultyServer, job_id: str) -> None:
    """Wait until a job has got two steps further."""
    wanted = server.row(job_id).step + 2
    processes.wait_until(lambda: server.row(job_id).step >= wanted, "the job gets on")


def test_forwards_and_back_in_mid_job(server: FaultyServer, clock: Path) -> None:
    before = (server.worker_pid, server.supervisor_pid)
    limit = {"deadline_seconds": 3600}
    jobs = [server.start(**LONG, **limit), server.start(seed=2)]
    go_on(server, jobs[0])
    put_wrong(clock, DAY_SECONDS)
    jobs.append(server.start(**LONG, **limit))
    created = server.job(jobs[2])["created_at"] - server.job(jobs[0])["created_at"]
    assert created >= DAY_SECONDS  # the fault is real
    go_on(server, jobs[0])
    server.finish(jobs[1])
    go_on(server, jobs[2])
    put_wrong(clock, -DAY_SECONDS)
    jobs.append(server.start(seed=3))
    go_on(server, jobs[2])
    for job_id in jobs:
        job = server.finish(job_id)
        assert job["metrics"]["queue_seconds"] >= 0
        assert job["metrics"]["total_seconds"] < 600
    started = [line["job"] for line in server.logged() if line["event"] == "job_started"]
    assert started == jobs  # still the oldest first
    server.wait_until_ready()
    put_wrong(clock, 0)
    server.check_sound()
    assert (server.worker_pid, server.supervisor_pid) == before
