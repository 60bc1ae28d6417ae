"""Many at once, on either engine: each job to one worker, limits and keys exact, no deadlock."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from server.claims import Claim, ClaimLostError, ClaimTable
from server.database import Database
from server.job import JobStatus
from server.jobs import JobTable, QueueFullError, QueueLimits
from server.webhook_table import WebhookTable
from tests.server.databases import disagreements
from tests.server.samples import new_job, result

THREADS = 8
MODEL = "tiny-wan"
T = TypeVar("T")


def all_of(work: Callable[[int], T]) -> list[T]:
    """Do it in eight threads at once."""
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(work, range(THREADS)))


def test_eight_workers_take_each_job_once(database: Database, jobs: JobTable) -> None:
    submitted = [jobs.submit(new_job(priority=number % 3)).job.id for number in range(300)]

    def take(number: int) -> list[str]:
        claims, taken = ClaimTable(database, worker=f"host/{number}"), []
        while job := claims.claim(MODEL):
            assert (job.attempt, job.worker) == (1, f"host/{number}")
            taken.append(job.id)
        return taken

    taken = [job_id for each in all_of(take) for job_id in each]
    assert sorted(taken) == submitted
    assert disagreements(database) == []


def test_limits_and_keys_hold_when_all_submit_at_once(database: Database) -> None:
    jobs = JobTable(database, QueueLimits(max_queued=25))

    def submit(number: int) -> tuple[int, set[str]]:
        refused, found = 0, set()
        for key in range(10):
            try:
                found.add(jobs.submit(new_job(key=f"{key % 5}" if number % 2 else None)).job.id)
            except QueueFullError:
                refused += 1
        return refused, found

    answers = all_of(submit)
    ids = set().union(*(found for _, found in answers))
    assert len(ids) == jobs.counts()[MODEL].queued == 25
    keyed = set().union(*(found for _, found in answers[1::2]))
    assert len(keyed) <= 5
    assert sum(refused for refused, _ in answers) > 0


def test_cancels_deletes_claims_and_ends_never_block_one_another(database: Database, jobs: JobTable) -> None:
    submitted = [jobs.submit(new_job(webhook_url="https://example.com/hook")).job.id for _ in range(48)]

    def meddle(number: int) -> None:
        claims = ClaimTable(database, worker=f"host/{number}")
        if number < 2:
            for job_id in submitted[number::4]:
                jobs.cancel(job_id)
        elif number < 4:
            for job_id in submitted[number::4]:
                jobs.delete(job_id)
        else:
            turn = 0
            while job := claims.claim(MODEL):
                turn += 1
                end_somehow(claims, Claim(job.id, job.attempt), turn)

    all_of(meddle)
    left: dict[JobStatus, int] = {}
    for job in jobs.page(after=None, limit=100, order="asc", status=None):
        left[job.status] = left.get(job.status, 0) + 1
        assert job.is_final
    assert sum(left.values()) == 24
    assert disagreements(database) == []


def end_somehow(claims: ClaimTable, claim: Claim, turn: int) -> None:
    """Complete, give back or lose the job, unless it was deleted."""
    try:
        claims.finish_step(claim, 1, 0.5, 10)
        if turn % 3:
            claims.complete(claim, result())
        else:
            claims.lose(claim, "killed")
    except ClaimLostError:
        return


def test_one_webhook_is_sent_by_one_process_at_a_time(database: Database, jobs: JobTable) -> None:
    jobs.cancel(jobs.submit(new_job(webhook_url="https://example.com/hook")).job.id)
    table = WebhookTable(database)
    (webhook,) = table.due()
    assert all_of(lambda _: table.lease(webhook.id)).count(True) == 1
    assert table.due() == []
    assert table.failed(webhook.id, 0)
    assert [row.id for row in table.due()] == [webhook.id]
    assert table.lease(webhook.id)
    table.release_all()
    assert [row.id for row in table.due()] == [webhook.id]


def test_eight_reapers_lose_a_claim_once(database: Database, jobs: JobTable) -> None:
    job_id = jobs.submit(new_job()).job.id
    claims = ClaimTable(database, worker="gone/0")
    job = claims.claim(MODEL)
    assert job is not None
    lost = all_of(lambda _: claims.reap())
    assert [claim for each in lost for claim in each] == [Claim(job_id, 1)]
    found = jobs.get(job_id)
    assert found is not None
    assert (found.status, found.losses) == ("queued", 1)
    assert disagreements(database) == []
