"""ETAs come from measurements or not at all."""

import dataclasses

import pytest

from server.claims import ClaimTable
from server.estimates import eta_seconds, remaining_seconds
from server.job import Job
from server.jobs import JobTable
from tests.server.samples import new_job
from tests.server.test_jobs import complete_one


@pytest.fixture
def running(jobs: JobTable, claims: ClaimTable) -> Job:
    """A job that was just claimed."""
    jobs.submit(new_job())
    job = claims.claim("tiny-wan")
    assert job is not None
    return job


def test_nothing_measured_is_unknown(jobs: JobTable, running: Job) -> None:
    assert remaining_seconds(jobs, running) is None


def test_a_first_job_is_measured_by_its_own_steps(jobs: JobTable, running: Job) -> None:
    halfway = dataclasses.replace(running, step=2, steps_run=2, denoise_seconds=6.0)
    assert remaining_seconds(jobs, halfway) == 2 * 3.0


def test_an_earlier_job_of_the_shape_is_better(jobs: JobTable, claims: ClaimTable) -> None:
    complete_one(jobs, claims)
    jobs.submit(new_job())
    job = claims.claim("tiny-wan")
    assert job is not None
    halfway = dataclasses.replace(job, step=2, denoise_seconds=600.0)
    remaining = remaining_seconds(jobs, halfway)
    assert remaining == 2 * 0.5 + 1.0


def test_a_queued_job_waits_for_the_running_one_too(jobs: JobTable, claims: ClaimTable) -> None:
    complete_one(jobs, claims)
    jobs.submit(new_job())
    running = claims.claim("tiny-wan")
    queued = jobs.submit(new_job()).job
    assert running is not None
    place = jobs.queue("tiny-wan")[queued.id]
    eta = eta_seconds(jobs, queued, place, [running])
    assert eta == 2 * (4 * 0.5 + 1.0)


def test_a_final_job_has_none(jobs: JobTable, claims: ClaimTable) -> None:
    done = jobs.get(complete_one(jobs, claims))
    assert done is not None
    assert eta_seconds(jobs, done, None, []) is None
