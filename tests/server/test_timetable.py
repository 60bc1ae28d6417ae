"""Waiting jobs start when a worker is free: the more workers, the sooner."""

import dataclasses

import pytest

from server.claims import ClaimTable
from server.database import Database, open_database
from server.job import Job
from server.jobs import JobTable
from server.retry_after import (
    LONGEST_RETRY_SECONDS,
    RETRY_SECONDS_WITHOUT_HISTORY,
    retry_after_full_queue,
    retry_after_quota,
)
from server.staffing import Staff
from server.timetable import Timetable
from server.workers import LOST_AFTER_SECONDS, WorkerTable
from tests.server.databases import Clock, JobDatabase, worker_report
from tests.server.samples import new_job
from tests.server.test_jobs import ALICE, BOB, claim_of, complete_one


@pytest.fixture(autouse=True)
def workers(database: Database) -> WorkerTable:
    """One worker is up."""
    table = WorkerTable(database)
    table.report(worker_report("local"))
    return table


def timetable(jobs: JobTable, workers: WorkerTable) -> Timetable:
    """As things stand."""
    return Timetable(jobs, "tiny-wan", Staff(workers.all()))


def ends(jobs: JobTable, workers: WorkerTable, *submitted: Job) -> list[float | None]:
    """When each of the jobs ends."""
    table = timetable(jobs, workers)
    return [table.end_of(job) for job in submitted]


def test_a_queued_job_waits_for_the_running_one_too(
    jobs: JobTable, claims: ClaimTable, workers: WorkerTable
) -> None:
    complete_one(jobs, claims)
    jobs.submit(new_job())
    running = claims.claim("tiny-wan")
    queued = jobs.submit(new_job()).job
    assert running is not None
    assert ends(jobs, workers, running, queued) == [3.0, 6.0]


def test_two_workers_take_turns(jobs: JobTable, claims: ClaimTable, workers: WorkerTable) -> None:
    complete_one(jobs, claims)
    jobs.submit(new_job(steps=8))
    assert claims.claim("tiny-wan") is not None  # 5 s
    queued = [jobs.submit(new_job()).job for _ in range(4)]  # 3 s each
    assert ends(jobs, workers, *queued) == [8.0, 11.0, 14.0, 17.0]
    workers.report(worker_report("b/0"))
    assert ends(jobs, workers, *queued) == [3.0, 6.0, 8.0, 9.0]
    assert timetable(jobs, workers).start_of_next(0, jobs.gpus) == 8.0
    workers.report(worker_report("c/0"))
    assert ends(jobs, workers, *queued) == [3.0, 3.0, 6.0, 6.0]


def test_only_workers_that_take_the_job_count(
    jobs: JobTable, claims: ClaimTable, workers: WorkerTable, clock: Clock
) -> None:
    complete_one(jobs, claims)
    queued = [jobs.submit(new_job()).job for _ in range(2)]
    workers.report(dataclasses.replace(worker_report("b/0"), model="other-model"))
    workers.report(dataclasses.replace(worker_report("c/0"), state="stopped"))
    workers.report(dataclasses.replace(worker_report("d/0"), state="load_failed"))
    assert ends(jobs, workers, *queued) == [3.0, 6.0]
    clock.shift(LOST_AFTER_SECONDS + 1)
    assert ends(jobs, workers, *queued) == [None, None]


def test_jobs_for_another_number_of_gpus_are_in_nobodys_way(
    jobs: JobTable, claims: ClaimTable, workers: WorkerTable, made: JobDatabase
) -> None:
    if made.url is None:
        return  # one host has one number
    complete_one(jobs, claims)
    of_two = open_database(made.settings.model_copy(update={"gpus": 2}))
    other = JobTable(of_two).submit(new_job()).job
    mine = jobs.submit(new_job()).job
    assert ends(jobs, workers, mine, other) == [3.0, None]
    workers.report(dataclasses.replace(worker_report("b/0"), gpus=2))
    assert ends(jobs, workers, mine, other) == [3.0, 3.0]
    of_two.close()


def test_the_job_of_a_lost_worker_runs_before_the_others(
    jobs: JobTable, claims: ClaimTable, workers: WorkerTable, database: Database
) -> None:
    complete_one(jobs, claims)
    jobs.submit(new_job())
    assert ClaimTable(database, worker="gone/0").claim("tiny-wan") is not None
    assert ends(jobs, workers, jobs.submit(new_job()).job) == [6.0]


def test_what_is_not_known_makes_all_behind_it_unknown(
    jobs: JobTable, claims: ClaimTable, workers: WorkerTable
) -> None:
    complete_one(jobs, claims)
    first = jobs.submit(new_job()).job
    unmeasured = new_job()
    wide = unmeasured.parameters.model_copy(update={"width": 128})
    jobs.submit(dataclasses.replace(unmeasured, parameters=wide))
    last = jobs.submit(new_job()).job
    assert ends(jobs, workers, first, last) == [3.0, None]
    assert timetable(jobs, workers).start_of_next(0, jobs.gpus) is None
    assert timetable(jobs, workers).start_of_next(1, jobs.gpus) == 0.0


def test_an_unmeasured_running_job_makes_the_start_unknown(
    jobs: JobTable, claims: ClaimTable, workers: WorkerTable
) -> None:
    jobs.submit(new_job())
    assert claims.claim("tiny-wan") is not None
    assert timetable(jobs, workers).start_of_next(0, jobs.gpus) is None


def test_a_final_job_has_no_end_to_come(jobs: JobTable, claims: ClaimTable, workers: WorkerTable) -> None:
    done = jobs.get(complete_one(jobs, claims))
    assert done is not None
    assert ends(jobs, workers, done) == [None]


def test_a_new_job_would_come_after_its_equals(
    jobs: JobTable, claims: ClaimTable, workers: WorkerTable
) -> None:
    assert timetable(jobs, workers).place_of_next(0, jobs.gpus) == 1
    assert timetable(jobs, workers).start_of_next(0, jobs.gpus) == 0.0
    complete_one(jobs, claims)
    for priority in (1, 0, -1):
        jobs.submit(new_job(priority=priority))
    for priority in (2, 1, 0, -1, -2):
        table = timetable(jobs, workers)
        submitted = jobs.submit(new_job(priority=priority)).job.id
        position = jobs.queue("tiny-wan")[submitted].position
        assert table.place_of_next(priority, jobs.gpus) == position
        assert table.start_of_next(priority, jobs.gpus) == 3.0 * (position - 1)
        jobs.delete(submitted)


def test_retry_after_is_when_the_running_job_ends(jobs: JobTable, claims: ClaimTable) -> None:
    jobs.submit(new_job())
    assert retry_after_full_queue(jobs, "tiny-wan") == RETRY_SECONDS_WITHOUT_HISTORY
    claims.requeue(claim_of(claims.claim("tiny-wan")))
    jobs.delete(claim_of(claims.claim("tiny-wan")).job_id)
    complete_one(jobs, claims)
    jobs.submit(new_job(steps=20))
    claims.claim("tiny-wan")
    assert retry_after_full_queue(jobs, "tiny-wan") == 20 * 0.5 + 1.0
    assert retry_after_full_queue(jobs, "other-model") == RETRY_SECONDS_WITHOUT_HISTORY


def test_retry_after_of_a_quota_is_when_the_owners_first_job_ends(
    jobs: JobTable, claims: ClaimTable, workers: WorkerTable
) -> None:
    complete_one(jobs, claims)
    jobs.submit(new_job(owner=BOB))
    claims.claim("tiny-wan")
    assert retry_after_quota(jobs, Staff(workers.all()), ALICE) == RETRY_SECONDS_WITHOUT_HISTORY
    jobs.submit(new_job(owner=ALICE, steps=5, priority=-1))
    jobs.submit(new_job(owner=ALICE, steps=4))
    assert retry_after_quota(jobs, Staff(workers.all()), BOB) == 3
    assert retry_after_quota(jobs, Staff(workers.all()), ALICE) == 3 + 3
    jobs.submit(new_job(owner="c" * 64, priority=9, steps=1_000_000))
    assert retry_after_quota(jobs, Staff(workers.all()), ALICE) == LONGEST_RETRY_SECONDS
