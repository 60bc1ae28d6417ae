"""Claims: one winner, fenced writes, and what becomes of a job whose worker died."""

import multiprocessing
import os
from collections.abc import Callable

import pytest

from configs.settings import Settings
from server import identity, observations
from server.claims import MAX_LOSSES, Claim, ClaimLostError, ClaimTable
from server.database import Database, open_database
from server.job import Job, JobError
from server.jobs import JobTable
from server.observations import read_buckets, read_samples
from server.webhook_table import WebhookTable
from server.workers import LOST_AFTER_SECONDS, WorkerTable
from tests.server.databases import Clock, JobDatabase, worker_report
from tests.server.samples import new_job, result
from tests.server.test_jobs import claim_of

WRITES: list[Callable[[ClaimTable, Claim], object]] = [
    lambda claims, claim: claims.held(claim),
    lambda claims, claim: claims.enter_stage(claim, "denoise", 2),
    lambda claims, claim: claims.finish_stage(claim, "denoise", 1.0),
    lambda claims, claim: claims.finish_step(claim, 1, 0.5, 10),
    lambda claims, claim: claims.set_checkpoint(claim, 1),
    lambda claims, claim: claims.set_preview(claim, 1),
    lambda claims, claim: claims.complete(claim, result()),
    lambda claims, claim: claims.fail(claim, JobError("internal", "no", False)),
    lambda claims, claim: claims.finish_cancel(claim),
    lambda claims, claim: claims.requeue(claim),
    lambda claims, claim: claims.lose(claim, "killed"),
]


def claim_until_empty(settings: Settings, results: "multiprocessing.Queue[list[tuple[str, int]]]") -> None:
    """In a process of its own: claim and complete jobs until there are none."""
    database = open_database(settings)
    claims = ClaimTable(database, worker=f"host/{os.getpid()}")
    taken = []
    while job := claims.claim("tiny-wan"):
        taken.append((job.id, job.attempt))
        claims.complete(Claim(job.id, job.attempt), result())
    results.put(taken)
    database.close()


def test_the_oldest_job_of_the_model_is_claimed(jobs: JobTable, claims: ClaimTable) -> None:
    jobs.submit(new_job("other-model"))
    first = jobs.submit(new_job()).job.id
    jobs.submit(new_job())
    job = claims.claim("tiny-wan")
    assert job is not None
    assert (job.id, job.status, job.attempt) == (first, "in_progress", 1)
    assert job.started_at is not None


def test_four_processes_never_claim_the_same_job(
    jobs: JobTable, database: Database, made: JobDatabase
) -> None:
    submitted = {jobs.submit(new_job()).job.id for _ in range(80)}
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    processes = [spawn.Process(target=claim_until_empty, args=(made.settings, results)) for _ in range(4)]
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


def test_the_highest_priority_is_claimed_first_and_the_oldest_among_equals(
    jobs: JobTable, claims: ClaimTable
) -> None:
    low, first, second, high = (
        jobs.submit(new_job(priority=priority)).job.id for priority in (-1, 0, 0, 100)
    )
    order = []
    while ahead := claims.peek("tiny-wan"):
        assert ahead.status == "queued"
        claimed = claim_of(claims.claim("tiny-wan"))
        assert claimed.job_id == ahead.id
        order.append(claimed.job_id)
    assert order == [high, first, second, low]
    assert claims.claim("tiny-wan") is None


def test_a_requeued_job_keeps_its_checkpoint_and_nothing_else(jobs: JobTable, claims: ClaimTable) -> None:
    jobs.submit(new_job())
    first = claim_of(claims.claim("tiny-wan"))
    for step in (1, 2, 3):
        claims.finish_step(first, step, 0.5, 10 * step)
    claims.set_checkpoint(first, 2)
    claims.set_preview(first, 3)
    running = the(jobs, first)
    assert (running.checkpoint_step, running.preview_step, running.steps_run) == (2, 3, 3)
    claims.lose(first, "killed")
    queued = the(jobs, first)
    assert (queued.checkpoint_step, queued.preview_step, queued.step, queued.steps_run) == (2, 0, 0, 0)
    second = claim_of(claims.claim("tiny-wan"))
    assert claims.finish_step(second, 3, 0.5, 30).checkpoint_step == 2
    assert claims.finish_step(second, 4, 0.5, 40).steps_run == 2
    claims.complete(second, result())
    assert the(jobs, first).checkpoint_step == 0


def test_steps_that_run_again_show_that_the_checkpoint_was_of_no_use(
    jobs: JobTable, claims: ClaimTable
) -> None:
    jobs.submit(new_job())
    first = claim_of(claims.claim("tiny-wan"))
    claims.finish_step(first, 2, 0.5, 10)
    claims.set_checkpoint(first, 2)
    claims.requeue(first)
    second = claim_of(claims.claim("tiny-wan"))
    assert claims.finish_step(second, 1, 0.5, 10).checkpoint_step == 0


def test_a_resumed_job_is_measured_by_the_steps_it_ran(jobs: JobTable, claims: ClaimTable) -> None:
    jobs.submit(new_job())
    first = claim_of(claims.claim("tiny-wan"))
    claims.set_checkpoint(first, 2)
    claims.requeue(first)
    second = claim_of(claims.claim("tiny-wan"))
    for step in (3, 4):
        claims.finish_step(second, step, 0.5, 10)
    claims.complete(second, result())
    (shape,) = jobs.measured_shapes("tiny-wan")
    assert (shape.step_seconds, shape.other_seconds) == (0.5, 3.0 - 2 * 0.5)


def test_a_job_resumed_after_its_last_step_is_no_measure(jobs: JobTable, claims: ClaimTable) -> None:
    jobs.submit(new_job())
    claims.complete(claim_of(claims.claim("tiny-wan")), result())
    assert jobs.measured_shapes("tiny-wan") == []


@pytest.mark.parametrize("jump_seconds", [-7200.0, 7200.0])
def test_a_clock_jump_spoils_no_measurement(
    jump_seconds: float,
    jobs: JobTable,
    claims: ClaimTable,
    database: Database,
    clock: Clock,
) -> None:
    jobs.submit(new_job())
    claim = claim_of(claims.claim("tiny-wan"))
    claims.finish_step(claim, 1, 0.5, 10)
    clock.shift(jump_seconds)
    claims.complete(claim, result())
    (shape,) = jobs.measured_shapes("tiny-wan")
    assert (shape.step_seconds, shape.other_seconds) == (0.5, 2.5)
    assert read_samples(database, observations.REALTIME) == {("tiny-wan",): 9 / 8 / 3.0}
    (duration,) = read_samples(database, observations.JOB_DURATION).values()
    assert duration >= 0.0


ENDS: list[Callable[[JobTable, ClaimTable], object]] = [
    lambda jobs, claims: claims.complete(claim_of(claims.claim("tiny-wan")), result()),
    lambda jobs, claims: claims.fail(claim_of(claims.claim("tiny-wan")), JobError("internal", "no", False)),
    lambda jobs, claims: jobs.cancel(jobs.page(after=None, limit=1, order="asc", status=None)[0].id),
    lambda jobs, claims: cancel_running(jobs, claim_of(claims.claim("tiny-wan")), claims),
    lambda jobs, claims: lose_twice(claims),
]


def cancel_running(jobs: JobTable, claim: Claim, claims: ClaimTable) -> None:
    """Ask for the cancel of a running job, and stop it."""
    jobs.cancel(claim.job_id)
    claims.finish_cancel(claim)


def lose_twice(claims: ClaimTable) -> None:
    """The worker dies with the job until the job fails."""
    for _ in range(MAX_LOSSES):
        claims.lose(claim_of(claims.claim("tiny-wan")), "killed")


@pytest.mark.parametrize("end", ENDS)
def test_every_end_sets_the_expiry_and_leaves_one_webhook(
    end: Callable[[JobTable, ClaimTable], object], database: Database
) -> None:
    jobs, claims = JobTable(database, retention_seconds=60.0), ClaimTable(database, retention_seconds=60.0)
    submitted = jobs.submit(new_job(webhook_url="https://example.com/hook")).job
    assert submitted.expires_at is None
    end(jobs, claims)
    ended = jobs.get(submitted.id)
    assert ended is not None
    assert ended.completed_at is not None
    assert ended.expires_at == ended.completed_at + 60.0
    (webhook,) = WebhookTable(database).due()
    assert (webhook.job_id, webhook.url) == (ended.id, "https://example.com/hook")
    assert (webhook.event, webhook.created_at) == (f"video.{ended.status}", ended.completed_at)


@pytest.mark.parametrize("end", ENDS)
def test_without_retention_and_webhook_an_end_sets_neither(
    end: Callable[[JobTable, ClaimTable], object], jobs: JobTable, claims: ClaimTable, database: Database
) -> None:
    job_id = jobs.submit(new_job()).job.id
    end(jobs, claims)
    ended = jobs.get(job_id)
    assert ended is not None
    assert ended.is_final
    assert ended.expires_at is None
    assert WebhookTable(database).due(1e12) == []


def test_a_requeued_job_leaves_no_webhook(jobs: JobTable, claims: ClaimTable, database: Database) -> None:
    jobs.submit(new_job(webhook_url="https://example.com/hook"))
    claims.requeue(claim_of(claims.claim("tiny-wan")))
    assert WebhookTable(database).due() == []


def test_a_worker_without_heartbeat_loses_its_jobs(jobs: JobTable, database: Database, clock: Clock) -> None:
    workers = WorkerTable(database)
    alive, silent = (ClaimTable(database, worker=name) for name in ("a/0", "b/0"))
    for name in ("a/0", "b/0"):
        workers.report(worker_report(name))
    for _ in range(2):
        jobs.submit(new_job())
    kept, lost = claim_of(alive.claim("tiny-wan")), claim_of(silent.claim("tiny-wan"))
    assert [job.id for job in jobs.running("b/0")] == [lost.job_id]
    assert alive.reap() == []
    clock.shift(LOST_AFTER_SECONDS + 1)
    workers.report(worker_report("a/0"))
    assert alive.reap() == [lost]
    assert alive.reap() == []
    assert (the(jobs, kept).status, the(jobs, lost).status, the(jobs, lost).losses) == (
        "in_progress",
        "queued",
        1,
    )
    with pytest.raises(ClaimLostError):
        silent.finish_step(lost, 1, 0.5, 10)
    workers.report(worker_report("b/0"))
    again = claim_of(silent.claim("tiny-wan"))
    assert again == Claim(lost.job_id, 2)
    workers.forget("b/0")
    assert alive.reap() == [again]
    failed = the(jobs, lost)
    assert failed.error is not None
    assert (failed.status, failed.error.code) == ("failed", "worker_lost")
    assert "no sign of life" in failed.error.message


def test_what_is_told_twice_counts_once(jobs: JobTable, claims: ClaimTable, database: Database) -> None:
    """The answer to a commit was lost with the connection, so the supervisor says it again."""
    jobs.submit(new_job())
    claim = claim_of(claims.claim("tiny-wan"))
    for _ in range(2):
        claims.enter_stage(claim, "denoise", 10)
        for step in (1, 2):
            job = claims.finish_step(claim, step, 0.5, 20 * step)
            assert claims.finish_step(claim, step, 0.5, 20 * step) == job
    for _ in range(3):
        claims.finish_stage(claim, "denoise", 1.0)
    claims.finish_stage(claim, "vae_decode", 2.0)
    found = jobs.find(claim.job_id)
    assert found is not None
    assert (found.step, found.steps_run, found.denoise_seconds) == (2, 2, 1.0)
    (steps,) = read_buckets(database, observations.STEP_DURATION).values()
    assert steps[-1][1] == 2
    stages = read_buckets(database, observations.STAGE_DURATION)
    assert {labels[1]: buckets[-1][1] for labels, buckets in stages.items()} == {
        "denoise": 1,
        "vae_decode": 1,
    }


def test_another_attempt_counts_its_own_steps_and_stages(
    jobs: JobTable, claims: ClaimTable, database: Database
) -> None:
    jobs.submit(new_job())
    for attempt in (1, 2):
        claim = claim_of(claims.claim("tiny-wan"))
        claims.finish_step(claim, 1, 0.5, 20)
        claims.finish_stage(claim, "denoise", 1.0)
        (steps,) = read_buckets(database, observations.STEP_DURATION).values()
        (stages,) = read_buckets(database, observations.STAGE_DURATION).values()
        assert (steps[-1][1], stages[-1][1]) == (attempt, attempt)
        claims.requeue(claim)


def reaped(jobs: JobTable, database: Database, job_id: str) -> int:
    """Losses of a job after the claims of silent workers were taken back."""
    ClaimTable(database).reap()
    found = jobs.find(job_id)
    assert found is not None
    assert found.status == "queued"
    return found.losses


def test_a_worker_that_fell_silent_with_the_database_is_not_blamed(
    jobs: JobTable, database: Database, clock: Clock
) -> None:
    """It may have been drained, and could tell nobody."""
    workers = WorkerTable(database)
    workers.report(worker_report("a/0"))
    job_id = jobs.submit(new_job()).job.id
    assert ClaimTable(database, worker="a/0").claim("tiny-wan") is not None
    identity.see(database)
    clock.shift(LOST_AFTER_SECONDS + 1)  # nobody wrote anything meanwhile
    identity.see(database)
    assert reaped(jobs, database, job_id) == 0


def test_a_worker_that_fell_silent_alone_is_blamed(jobs: JobTable, database: Database, clock: Clock) -> None:
    workers = WorkerTable(database)
    identity.see(database)
    clock.shift(100)
    identity.see(database)  # an outage, and it is over
    workers.report(worker_report("a/0"))
    job_id = jobs.submit(new_job()).job.id
    assert ClaimTable(database, worker="a/0").claim("tiny-wan") is not None
    for seconds in range(100, 100 + int(LOST_AFTER_SECONDS) + 2, int(identity.SEE_SECONDS)):
        clock.shift(seconds)
        identity.see(database)
    clock.shift(100 + LOST_AFTER_SECONDS + 1)
    assert reaped(jobs, database, job_id) == 1
