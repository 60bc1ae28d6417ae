"""The job table as the HTTP side sees it."""

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from server.claims import Claim, ClaimTable
from server.database import Database
from server.job import JOB_ID_PATTERN, Job, new_job_id
from server.jobs import (
    IdempotencyConflictError,
    JobTable,
    QueueCounts,
    QueueFullError,
    QueueLimits,
    QueuePlace,
    QuotaExceededError,
)
from tests.server.databases import Clock
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
    # Steps took 0.5 s each; the result says 3 s in all, so everything else took 1 s.
    assert queue[first].seconds == 4 * 0.5 + 1.0
    assert queue[second].seconds == 8 * 0.5 + 1.0


def test_what_an_unmeasured_shape_takes_is_not_known(jobs: JobTable) -> None:
    job = jobs.submit(new_job(priority=2)).job
    assert jobs.queue("tiny-wan") == {job.id: QueuePlace(1, None, 2, jobs.gpus)}


def test_counts_are_per_model(jobs: JobTable, claims: ClaimTable, clock: Clock) -> None:
    oldest = jobs.submit(new_job()).job
    jobs.submit(new_job())
    jobs.submit(new_job("other-model"))
    claims.claim("other-model")
    clock.stop_at(oldest.created_at + 5)
    counts = jobs.counts()
    age = counts["tiny-wan"].oldest_age_seconds
    assert age == pytest.approx(5)
    assert counts == {
        "tiny-wan": QueueCounts(queued=2, running=0, oldest_age_seconds=age),
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


ALICE, BOB = "a" * 64, "b" * 64


def ids_of(jobs: JobTable, owner: str | None) -> list[str]:
    """What the owner's list shows."""
    return [job.id for job in jobs.page(owner, after=None, limit=9, order="asc", status=None)]


@pytest.mark.parametrize("stranger", [BOB, None, "", ALICE.upper()])
@pytest.mark.parametrize("is_final", [False, True])
def test_a_job_is_its_owners_alone(jobs: JobTable, stranger: str | None, is_final: bool) -> None:
    job = jobs.submit(new_job(owner=ALICE)).job
    if is_final:
        jobs.cancel(job.id, ALICE)
    before = jobs.get(job.id, ALICE)
    assert before is not None
    assert jobs.get(job.id, stranger) is None
    assert jobs.cancel(job.id, stranger) is None
    assert jobs.delete(job.id, stranger) is None
    assert ids_of(jobs, stranger) == []
    assert jobs.get(job.id, ALICE) == jobs.find(job.id) == before
    assert ids_of(jobs, ALICE) == [job.id]
    assert jobs.delete(job.id, ALICE) == before


def test_a_job_submitted_without_a_key_is_no_keys(jobs: JobTable) -> None:
    job = jobs.submit(new_job()).job
    assert jobs.get(job.id, ALICE) is None
    assert ids_of(jobs, ALICE) == []
    assert jobs.get(job.id, None) == job


def test_idempotency_keys_are_each_owners_own(jobs: JobTable) -> None:
    owners = (ALICE, BOB, None)
    submissions = {owner: jobs.submit(new_job(owner=owner, key="k")) for owner in owners}
    assert all(submission.is_new for submission in submissions.values())
    for owner in owners:
        again = jobs.submit(new_job(owner=owner, key="k"))
        assert (again.job, again.is_new) == (submissions[owner].job, False)
    # A key that spells another owner's stored key finds nothing of theirs.
    assert jobs.submit(new_job(key=f"{ALICE}:k")).is_new


def test_priority_decides_the_place_in_the_queue(jobs: JobTable, claims: ClaimTable) -> None:
    complete_one(jobs, claims)
    low, first, second, high = (jobs.submit(new_job(priority=priority)).job.id for priority in (-5, 0, 0, 5))
    queue = jobs.queue("tiny-wan")
    assert [queue[job_id].position for job_id in (high, first, second, low)] == [1, 2, 3, 4]
    assert [*queue] == [high, first, second, low]


def test_saved_steps_shorten_the_wait(jobs: JobTable, claims: ClaimTable) -> None:
    complete_one(jobs, claims)
    jobs.submit(new_job())
    claim = claim_of(claims.claim("tiny-wan"))
    claims.set_checkpoint(claim, 3)
    claims.requeue(claim)
    assert jobs.queue("tiny-wan")[claim.job_id].seconds == 1 * 0.5 + 1.0


def test_a_full_queue_takes_no_job_but_answers_a_repeated_one(database: Database, claims: ClaimTable) -> None:
    jobs = JobTable(database, QueueLimits(max_queued=2))
    first = jobs.submit(new_job(key="once")).job
    jobs.submit(new_job())
    with pytest.raises(QueueFullError) as caught:
        jobs.submit(new_job(priority=100))
    assert caught.value.limit == 2
    assert jobs.submit(new_job(key="once")).job == first
    with pytest.raises(IdempotencyConflictError):
        jobs.submit(dataclasses.replace(new_job(key="once"), request_sha256="0" * 64))
    assert jobs.submit(new_job("other-model")).is_new
    claims.claim("tiny-wan")
    assert jobs.submit(new_job()).is_new
    with pytest.raises(QueueFullError):
        jobs.submit(new_job())


def test_a_quota_counts_the_owners_unfinished_jobs(database: Database, claims: ClaimTable) -> None:
    jobs = JobTable(database, QueueLimits(max_of_owner=2))
    jobs.submit(new_job(owner=ALICE, key="once"))
    second = jobs.submit(new_job("other-model", owner=ALICE)).job
    claims.claim("tiny-wan")
    with pytest.raises(QuotaExceededError) as caught:
        jobs.submit(new_job(owner=ALICE))
    assert caught.value.limit == 2
    assert not jobs.submit(new_job(owner=ALICE, key="once")).is_new
    assert [job.id for job in jobs.unfinished(ALICE)] == ids_of(jobs, ALICE)
    for owner in (BOB, None, None, None):
        jobs.submit(new_job(owner=owner))
    jobs.cancel(second.id, ALICE)
    assert jobs.submit(new_job(owner=ALICE)).is_new


def test_threads_that_submit_at_once_never_pass_a_limit(database: Database) -> None:
    jobs = JobTable(database, QueueLimits(max_queued=10, max_of_owner=6))

    def submit(number: int) -> type[Exception] | None:
        try:
            jobs.submit(new_job(owner=(ALICE, BOB)[number % 2]))
        except (QueueFullError, QuotaExceededError) as error:
            return type(error)
        return None

    with ThreadPoolExecutor(8) as threads:
        refusals = list(threads.map(submit, range(40)))
    assert refusals.count(None) == jobs.counts()["tiny-wan"].queued == 10
    assert max(len(jobs.unfinished(owner)) for owner in (ALICE, BOB)) <= 6
    assert {QueueFullError, QuotaExceededError} >= set(refusals) - {None} > set()


def test_threads_that_repeat_one_request_make_one_job(database: Database) -> None:
    jobs = JobTable(database, QueueLimits(max_queued=1))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: jobs.submit(new_job(key="once")), range(16)))
    assert len({submission.job.id for submission in found}) == 1
    assert [submission.is_new for submission in found].count(True) == 1


def test_an_expired_job_is_gone_before_it_is_swept(database: Database, clock: Clock) -> None:
    jobs = JobTable(database, retention_seconds=100)
    waiting = jobs.submit(new_job()).job.id
    ended = jobs.submit(new_job(key="once")).job.id
    jobs.cancel(ended)
    assert ids_of(jobs, None) == [waiting, ended]
    job = jobs.get(ended)
    assert job is not None
    assert job.expires_at is not None
    later = job.expires_at + 1
    assert (jobs.expired(later - 2), jobs.expired(later)) == ([], [ended])
    clock.stop_at(later)
    assert jobs.get(ended) is jobs.find(ended) is jobs.cancel(ended) is jobs.delete(ended) is None
    assert ids_of(jobs, None) == [waiting]
    assert jobs.page(after=None, limit=9, order="desc", status="cancelled") == []
    again = jobs.submit(new_job(key="once"))
    assert again.is_new
    assert jobs.delete_expired() == [ended]
    assert jobs.delete_expired() == jobs.expired() == []
    assert ids_of(jobs, None) == [waiting, again.job.id]


def test_a_clock_that_is_set_back_keeps_the_order_and_the_jobs(
    jobs: JobTable, claims: ClaimTable, clock: Clock
) -> None:
    first = jobs.submit(new_job()).job
    submitted = [first.id]
    clock.stop_at(first.created_at - 7200)
    submitted += [jobs.submit(new_job()).job.id for _ in range(3)]
    assert submitted == sorted(set(submitted)) == ids_of(jobs, None)
    job = claims.claim("tiny-wan")
    assert job is not None
    assert job.id == submitted[0]
    claims.complete(Claim(job.id, job.attempt), result())
    assert claim_of(claims.claim("tiny-wan")).job_id == submitted[1]


def test_ids_cannot_be_guessed_from_one_another() -> None:
    ids = {new_job_id() for _ in range(100)}
    assert len({job_id[-16:] for job_id in ids}) == 100
    assert all(re.fullmatch(JOB_ID_PATTERN, job_id) for job_id in ids)
    newest = f"video_{'f' * 15}e{'0' * 16}"
    assert new_job_id(newest).startswith(f"video_{'f' * 16}")
