"""The job table as the HTTP side sees it."""

import dataclasses

import pytest

from server.claims import Claim, ClaimTable
from server.job import Job, new_job_id
from server.jobs import IdempotencyConflictError, JobTable, QueueCounts, QueuePlace
from tests.server.samples import new_job, parameters, result


def claim_of(job: Job | None) -> Claim:
    """The claim that ``ClaimTable.claim`` made."""
    assert job is not None
    return Claim(job.id, job.attempt)


def complete_one(jobs: JobTable, claims: ClaimTable, model: str = "tiny-wan") -> str:
    """Submit a job and run it to its end: four steps of half a second."""
    jobs.submit(new_job(model))
    claim = claim_of(claims.claim(model))
    for step in range(1, 5):
        claims.finish_step(claim, step, 0.5, progress=step)
    claims.complete(claim, result())
    return claim.job_id


def test_a_submitted_job_reads_back_whole(jobs: JobTable) -> None:
    submitted = jobs.submit(new_job()).job
    assert jobs.get(submitted.id) == submitted
    assert (submitted.status, submitted.version, submitted.attempt) == ("queued", 1, 0)
    assert submitted.parameters == parameters()
    assert submitted.metadata == {"owner": "test"}
    assert not submitted.is_final


def test_a_repeated_idempotency_key_finds_its_job(jobs: JobTable) -> None:
    new = dataclasses.replace(new_job(), idempotency_key="once")
    first = jobs.submit(new)
    assert first.is_new
    again = jobs.submit(dataclasses.replace(new, parameters=parameters(steps=5)))
    assert (again.job, again.is_new) == (first.job, False)
    with pytest.raises(IdempotencyConflictError) as caught:
        jobs.submit(dataclasses.replace(new, request_sha256="0" * 64))
    assert caught.value.job_id == first.job.id
    jobs.delete(first.job.id)
    assert jobs.submit(new).is_new


def test_an_unknown_id_is_none(jobs: JobTable) -> None:
    assert jobs.get(new_job_id()) is None
    assert jobs.cancel(new_job_id()) is None
    assert jobs.delete(new_job_id()) is None


def test_ids_sort_by_submission(jobs: JobTable) -> None:
    ids = [jobs.submit(new_job()).job.id for _ in range(20)]
    assert ids == sorted(ids)


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_show_every_job_once(jobs: JobTable, order: str) -> None:
    ids = [jobs.submit(new_job()).job.id for _ in range(7)]
    seen: list[str] = []
    after = None
    while page := jobs.page(after=after, limit=3, order="asc" if order == "asc" else "desc", status=None):
        seen += [job.id for job in page]
        after = seen[-1]
    assert seen == (ids if order == "asc" else ids[::-1])


def test_paging_goes_on_after_a_deleted_job(jobs: JobTable) -> None:
    first, second, third = (jobs.submit(new_job()).job.id for _ in range(3))
    jobs.delete(second)
    assert [job.id for job in jobs.page(after=second, limit=9, order="asc", status=None)] == [third]
    assert [job.id for job in jobs.page(after=second, limit=9, order="desc", status=None)] == [first]


def test_pages_filter_by_status(jobs: JobTable) -> None:
    kept, cancelled = jobs.submit(new_job()).job.id, jobs.submit(new_job()).job.id
    jobs.cancel(cancelled)
    assert [job.id for job in jobs.page(after=None, limit=9, order="asc", status="queued")] == [kept]
    assert [job.id for job in jobs.page(after=None, limit=9, order="asc", status="cancelled")] == [cancelled]


def test_cancelling_a_queued_job_is_immediate_and_idempotent(jobs: JobTable, claims: ClaimTable) -> None:
    job_id = jobs.submit(new_job()).job.id
    first = jobs.cancel(job_id)
    assert first is not None
    assert first.status == "cancelled"
    assert first.completed_at is not None
    assert jobs.cancel(job_id) == first
    assert claims.claim("tiny-wan") is None


def test_cancelling_a_running_job_asks_for_it_once(jobs: JobTable, claims: ClaimTable) -> None:
    job_id = jobs.submit(new_job()).job.id
    claims.claim("tiny-wan")
    first = jobs.cancel(job_id)
    assert first is not None
    assert (first.status, first.cancel_requested, first.completed_at) == ("in_progress", True, None)
    assert jobs.cancel(job_id) == first


def test_cancelling_a_completed_job_changes_nothing(jobs: JobTable, claims: ClaimTable) -> None:
    job_id = complete_one(jobs, claims)
    before = jobs.get(job_id)
    assert jobs.cancel(job_id) == before


def test_the_queue_knows_places_and_measured_seconds(jobs: JobTable, claims: ClaimTable) -> None:
    complete_one(jobs, claims)
    first, second = jobs.submit(new_job(steps=4)).job.id, jobs.submit(new_job(steps=8)).job.id
    timing = jobs.timing(jobs.submit(new_job("other-model")).job.shape)
    assert timing is None
    queue = jobs.queue("tiny-wan")
    assert [queue[first].position, queue[second].position] == [1, 2]
    ahead, whole = queue[first].seconds, queue[second].seconds
    assert ahead is not None
    assert whole is not None
    # Steps took 0.5 s each; the result says 3 s in all, so everything else took 1 s.
    assert ahead == 4 * 0.5 + 1.0
    assert whole - ahead == 8 * 0.5 + 1.0


def test_an_unmeasured_shape_ahead_makes_the_wait_unknown(jobs: JobTable) -> None:
    job = jobs.submit(new_job()).job
    assert jobs.queue("tiny-wan") == {job.id: QueuePlace(1, None)}


def test_counts_are_per_model(jobs: JobTable, claims: ClaimTable) -> None:
    oldest = jobs.submit(new_job()).job
    jobs.submit(new_job())
    jobs.submit(new_job("other-model"))
    claims.claim("other-model")
    assert jobs.counts() == {
        "tiny-wan": QueueCounts(queued=2, running=0, oldest_created_at=oldest.created_at),
        "other-model": QueueCounts(queued=0, running=1),
    }


def test_completed_attempts_are_those_of_completed_jobs(jobs: JobTable, claims: ClaimTable) -> None:
    job_id = complete_one(jobs, claims)
    jobs.submit(new_job())
    claims.claim("tiny-wan")
    assert jobs.completed_attempts() == {job_id: 1}
    assert [job.id for job in jobs.recent_completed("tiny-wan", 5)] == [job_id]
    assert len(jobs.running()) == 1


def test_a_row_survives_in_the_file(jobs: JobTable, claims: ClaimTable) -> None:
    completed = jobs.get(complete_one(jobs, claims))
    assert completed is not None
    assert completed.result == result()
    assert completed.progress == 100
    assert completed.is_final
