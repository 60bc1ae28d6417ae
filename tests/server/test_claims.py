"""Claims: one winner, fenced writes, and what becomes of a job whose worker died."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest

from server import observations
from server.claims import MAX_LOSSES, Claim, ClaimLostError, ClaimTable
from server.database import Database
from server.job import Job, JobError
from server.jobs import JobTable
from server.observations import read_samples
from tests.server.samples import new_job, result
from tests.server.test_jobs import claim_of

WRITES: list[Callable[[ClaimTable, Claim], object]] = [
    lambda claims, claim: claims.held(claim),
    lambda claims, claim: claims.enter_stage(claim, "denoise", 2),
    lambda claims, claim: claims.finish_stage(claim, "denoise", 1.0),
    lambda claims, claim: claims.finish_step(claim, 1, 0.5, 10),
    lambda claims, claim: claims.complete(claim, result()),
    lambda claims, claim: claims.fail(claim, JobError("internal", "no", False)),
    lambda claims, claim: claims.finish_cancel(claim),
    lambda claims, claim: claims.requeue(claim),
    lambda claims, claim: claims.lose(claim, "killed"),
]


def claim_until_empty(path: Path, results: "multiprocessing.Queue[list[tuple[str, int]]]") -> None:
    """In a process of its own: claim and complete jobs until there are none."""
    claims = ClaimTable(Database(path))
    taken = []
    while job := claims.claim("tiny-wan"):
        taken.append((job.id, job.attempt))
        claims.complete(Claim(job.id, job.attempt), result())
    results.put(taken)


def test_the_oldest_job_of_the_model_is_claimed(jobs: JobTable, claims: ClaimTable) -> None:
    jobs.submit(new_job("other-model"))
    first = jobs.submit(new_job()).job.id
    jobs.submit(new_job())
    job = claims.claim("tiny-wan")
    assert job is not None
    assert (job.id, job.status, job.attempt) == (first, "in_progress", 1)
    assert job.started_at is not None


def test_four_processes_never_claim_the_same_job(jobs: JobTable, database: Database) -> None:
    submitted = {jobs.submit(new_job()).job.id for _ in range(80)}
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    processes = [spawn.Process(target=claim_until_empty, args=(database.path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    taken = [entry for _ in processes for entry in results.get(timeout=60)]
    for process in processes:
        process.join()
    assert len(taken) == len(submitted)
    assert {job_id for job_id, _ in taken} == submitted
    assert {attempt for _, attempt in taken} == {1}
    assert read_samples(database, observations.JOBS_TOTAL) == {("tiny-wan", "completed"): 80.0}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("how", ["deleted", "requeued and claimed again", "completed"])
def test_a_lost_claim_can_write_nothing(
    write: Callable[[ClaimTable, Claim], object], how: str, jobs: JobTable, claims: ClaimTable
) -> None:
    jobs.submit(new_job())
    claim = claim_of(claims.claim("tiny-wan"))
    if how == "deleted":
        jobs.delete(claim.job_id)
    elif how == "completed":
        claims.complete(claim, result())
    else:
        claims.requeue(claim)
        claims.claim("tiny-wan")
    before = jobs.get(claim.job_id)
    with pytest.raises(ClaimLostError):
        write(claims, claim)
    assert jobs.get(claim.job_id) == before


def test_progress_never_falls(jobs: JobTable, claims: ClaimTable) -> None:
    jobs.submit(new_job())
    claim = claim_of(claims.claim("tiny-wan"))
    claims.finish_step(claim, 2, 0.5, 40)
    claims.enter_stage(claim, "vae_decode", 10)
    job = jobs.get(claim.job_id)
    assert job is not None
    assert (job.progress, job.stage, job.step, job.last_step_seconds) == (40, "vae_decode", 2, 0.5)


def test_every_write_raises_the_version(jobs: JobTable, claims: ClaimTable) -> None:
    versions = [jobs.submit(new_job()).job.version]
    claim = claim_of(claims.claim("tiny-wan"))
    versions.append(the(jobs, claim).version)
    claims.enter_stage(claim, "denoise", 2)
    versions.append(the(jobs, claim).version)
    claims.finish_step(claim, 1, 0.5, 10)
    versions.append(the(jobs, claim).version)
    jobs.cancel(claim.job_id)
    versions.append(the(jobs, claim).version)
    claims.finish_cancel(claim)
    versions.append(the(jobs, claim).version)
    assert versions == sorted(set(versions))


def test_a_step_tells_of_a_cancel(jobs: JobTable, claims: ClaimTable) -> None:
    jobs.submit(new_job())
    claim = claim_of(claims.claim("tiny-wan"))
    assert not claims.finish_step(claim, 1, 0.5, 10).cancel_requested
    jobs.cancel(claim.job_id)
    assert claims.finish_step(claim, 2, 0.5, 20).cancel_requested
    claims.finish_cancel(claim)
    assert the(jobs, claim).status == "cancelled"


def test_a_lost_job_runs_again_and_then_fails(jobs: JobTable, claims: ClaimTable) -> None:
    jobs.submit(new_job())
    first = claim_of(claims.claim("tiny-wan"))
    claims.finish_step(first, 1, 0.5, 10)
    claims.lose(first, "killed by SIGKILL")
    lost = the(jobs, first)
    assert (lost.status, lost.losses, lost.step, lost.progress) == ("queued", 1, 0, 0)
    second = claim_of(claims.claim("tiny-wan"))
    assert second == Claim(first.job_id, 2)
    claims.lose(second, "killed by SIGKILL")
    failed = the(jobs, first)
    assert (failed.status, MAX_LOSSES) == ("failed", 2)
    assert failed.error is not None
    assert failed.error.code == "worker_lost"
    assert "SIGKILL" in failed.error.message
    assert failed.error.retryable


def test_a_drain_does_not_count_as_a_loss(jobs: JobTable, claims: ClaimTable) -> None:
    jobs.submit(new_job())
    for _ in range(MAX_LOSSES + 1):
        claims.requeue(claim_of(claims.claim("tiny-wan")))
    assert the(jobs, claim_of(claims.claim("tiny-wan"))).losses == 0


@pytest.mark.parametrize("give_back", [ClaimTable.requeue, lambda claims, claim: claims.lose(claim, "x")])
def test_a_job_that_was_to_be_cancelled_does_not_run_again(
    give_back: Callable[[ClaimTable, Claim], None], jobs: JobTable, claims: ClaimTable
) -> None:
    jobs.submit(new_job())
    claim = claim_of(claims.claim("tiny-wan"))
    jobs.cancel(claim.job_id)
    give_back(claims, claim)
    assert the(jobs, claim).status == "cancelled"


def test_a_requeued_job_is_the_next_one(jobs: JobTable, claims: ClaimTable) -> None:
    first = jobs.submit(new_job()).job.id
    jobs.submit(new_job())
    claims.requeue(claim_of(claims.claim("tiny-wan")))
    assert claim_of(claims.claim("tiny-wan")) == Claim(first, 2)


def test_a_completed_job_leaves_its_measurements(
    jobs: JobTable, claims: ClaimTable, database: Database
) -> None:
    jobs.submit(new_job())
    claim = claim_of(claims.claim("tiny-wan"))
    for step in range(1, 5):
        claims.finish_step(claim, step, 0.5, step)
    claims.complete(claim, result())
    timing = jobs.timing(the(jobs, claim).shape)
    assert timing is not None
    assert timing.step_seconds == 0.5
    assert read_samples(database, observations.PEAK_MEMORY) == {("tiny-wan", "cpu"): 123.0}
    assert read_samples(database, observations.DENSITY) == {("tiny-wan", "anchor_local"): 0.5}
    assert read_samples(database, observations.STEP_DURATION) == {("tiny-wan", "anchor_local"): 2.0}


def the(jobs: JobTable, claim: Claim) -> Job:
    """The claim's job."""
    job = jobs.get(claim.job_id)
    assert job is not None
    return job
