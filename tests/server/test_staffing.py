"""Which jobs a worker takes, and what is said of those that none does."""

import dataclasses

from server.database import open_database
from server.jobs import JobTable, WaitingJobs
from server.staffing import Staff, Unserved
from server.workers import LOST_AFTER_SECONDS, Worker, WorkerState
from tests.server.databases import JobDatabase, worker_report
from tests.server.samples import new_job


def worker(state: WorkerState = "ready", gpus: int = 1, age_seconds: float = 0.0) -> Worker:
    """A slot that gave a sign of life so long ago."""
    report = dataclasses.asdict(worker_report("a/0")) | {"state": state, "gpus": gpus, "message": "no room"}
    return Worker(**report, heartbeat_at=0.0, heartbeat_age_seconds=age_seconds)


def test_jobs_for_any_number_of_gpus_are_anybodys() -> None:
    staff = Staff([worker(gpus=4)])
    assert staff.waiting_reason("tiny-wan", None) is None
    assert staff.waiting_reason("tiny-wan", 4) is None
    assert len(staff.of("tiny-wan", None)) == 1


def test_the_reason_says_what_is_missing_and_what_is_there() -> None:
    four = Staff([worker(gpus=4), worker(gpus=2)])
    assert four.waiting_reason("tiny-wan", 1) == (
        "no worker of model tiny-wan on 1 GPU is up; those that are up have 2 GPUs or 4 GPUs"
    )
    assert four.waiting_reason("other", 2) == "no worker of model other on 2 GPUs is up"
    assert Staff([]).waiting_reason("tiny-wan", 1) == "no worker of model tiny-wan is up"
    assert Staff([worker("load_failed")]).waiting_reason("tiny-wan", 1) == (
        "no worker of model tiny-wan takes jobs: load_failed: no room"
    )


def test_only_those_that_live_take_jobs() -> None:
    for state in ("loading", "restarting", "ready"):
        assert Staff([worker(state)]).waiting_reason("tiny-wan", 1) is None
    assert Staff([worker("stopped")]).waiting_reason("tiny-wan", 1) is not None
    assert Staff([worker(age_seconds=LOST_AFTER_SECONDS)]).waiting_reason("tiny-wan", 1) is not None


def test_unserved_jobs_are_one_line_for_each_kind() -> None:
    one, two = WaitingJobs("tiny-wan", 1, 5, 9.0), WaitingJobs("tiny-wan", 2, 1, 3.0)
    (found,) = Staff([worker()]).unserved([one, two])
    assert found == Unserved(two, found.reason)
    assert str(found) == (
        "1 queued job waits: no worker of model tiny-wan on 2 GPUs is up; those that are up have 1 GPU"
    )


def test_jobs_wait_by_number_of_gpus_where_there_are_several_hosts(jobs: JobTable, made: JobDatabase) -> None:
    other = open_database(made.settings.model_copy(update={"gpus": 2}))
    first, second = jobs.submit(new_job()).job, JobTable(other).submit(new_job()).job
    kinds = [(found.model, found.gpus, found.count) for found in jobs.waiting()]
    places = jobs.queue("tiny-wan")
    if made.url is None:
        assert kinds == [("tiny-wan", None, 2)]
        assert [places[job.id].position for job in (first, second)] == [1, 2]
    else:
        assert kinds == [("tiny-wan", 1, 1), ("tiny-wan", 2, 1)]
        assert [places[job.id].position for job in (first, second)] == [1, 1]
    other.close()
