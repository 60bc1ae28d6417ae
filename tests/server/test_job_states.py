"""The job table under random histories, against a model of it in a few dictionaries.

Whatever happens in whatever order: no job is lost, none ends twice, a status never changes after an end, and
a claim that was taken away writes nothing.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server import observations
from server.claims import MAX_LOSSES, Claim, ClaimLostError, ClaimTable
from server.job import JobError, JobStatus
from server.jobs import JobTable, QueueFullError, QueueLimits, QuotaExceededError
from server.observations import read_samples
from server.webhook_table import WebhookTable
from tests.postgres import PostgresServer
from tests.server.databases import Clock, disagreements, job_database
from tests.server.samples import new_job, result
from tests.server.test_claims import WRITES

MODEL = "tiny-wan"
OWNERS = ("a" * 64, "b" * 64, None)
LIMITS = QueueLimits(max_queued=4, max_of_owner=3)
RETENTION_SECONDS = 1000.0
FINAL = frozenset({"completed", "failed", "cancelled"})
pick = st.integers(0, 1000)


@dataclass
class Expected:
    """What the table should say of a job."""

    owner: str | None
    priority: int
    has_webhook: bool
    status: JobStatus = "queued"
    attempt: int = 0
    losses: int = 0
    is_to_be_cancelled: bool = False
    checkpoint_step: int = 0
    expires_at: float | None = None
    idempotency_key: str | None = None


@dataclass
class World:
    """Everything that was promised to clients."""

    jobs: dict[str, Expected] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    stale: list[Claim] = field(default_factory=list)
    now: float = 1e9


class JobTableMachine(RuleBasedStateMachine):
    """Clients, a worker that dies, a clock that jumps, and a sweep."""

    engine = "sqlite"

    @staticmethod
    def server() -> PostgresServer:
        """The server of the databases; SQLite needs none."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(TemporaryDirectory()))
        made = self._stack.enter_context(job_database(self.engine, folder, self.server))
        self._clock = Clock(made, self._patch)
        self._database = made.database
        self._table = JobTable(self._database, LIMITS, RETENTION_SECONDS)
        self._claims = ClaimTable(self._database, RETENTION_SECONDS)
        self._world = World()
        self._clock.stop_at(self._world.now)

    def teardown(self) -> None:
        self._patch.undo()
        self._stack.close()

    def _ids(self, *statuses: str) -> list[str]:
        """Jobs that clients can see, in the order of their submission."""
        return [
            job_id
            for job_id, job in self._world.jobs.items()
            if (job.status in statuses or not statuses) and not self._is_expired(job)
        ]

    def _is_expired(self, job: Expected) -> bool:
        return job.expires_at is not None and job.expires_at <= self._world.now

    def _claim_of(self, job_id: str) -> Claim:
        return Claim(job_id, self._world.jobs[job_id].attempt)

    def _end(self, job_id: str, status: JobStatus) -> None:
        job = self._world.jobs[job_id]
        assert job.status not in FINAL
        job.status, job.checkpoint_step = status, 0
        job.expires_at = self._world.now + RETENTION_SECONDS
        self._world.ended[status] += 1
        if job.attempt:
            self._world.stale.append(self._claim_of(job_id))

    @rule(owner=st.sampled_from(OWNERS), priority=st.integers(-1, 1), has_webhook=st.booleans())
    def submit(self, owner: str | None, priority: int, has_webhook: bool) -> None:
        url = "https://example.com/hook" if has_webhook else None
        new = new_job(owner=owner, priority=priority, webhook_url=url)
        unfinished = [job for job in self._world.jobs.values() if job.status not in FINAL]
        of_owner = [job for job in unfinished if job.owner == owner]
        refusal: type[Exception] | None = None
        if owner is not None and len(of_owner) >= 3:
            refusal = QuotaExceededError
        elif sum(job.status == "queued" for job in unfinished) >= 4:
            refusal = QueueFullError
        if refusal is not None:
            with pytest.raises(refusal):
                self._table.submit(new)
            return
        job_id = self._table.submit(new).job.id
        assert all(job_id > other for other in self._world.jobs)
        self._world.jobs[job_id] = Expected(owner, priority, has_webhook)

    @rule(owner=st.sampled_from(OWNERS), key=st.sampled_from(("x", "y")))
    def submit_again(self, owner: str | None, key: str) -> None:
        known = [
            job_id
            for job_id in self._ids()
            if self._world.jobs[job_id].idempotency_key == key and self._world.jobs[job_id].owner == owner
        ]
        try:
            submission = self._table.submit(new_job(owner=owner, key=key))
        except (QueueFullError, QuotaExceededError):
            assert not known
            return
        assert submission.is_new == (not known)
        if submission.is_new:
            self._world.jobs[submission.job.id] = Expected(owner, 0, False, idempotency_key=key)
        else:
            assert [submission.job.id] == known

    @rule()
    def claim(self) -> None:
        waiting = sorted(self._ids("queued"), key=lambda job_id: (-self._world.jobs[job_id].priority, job_id))
        ahead, job = self._claims.peek(MODEL), self._claims.claim(MODEL)
        assert (ahead.id if ahead else None) == (job.id if job else None)
        assert (job.id if job else None) == next(iter(waiting), None)
        if job is not None:
            expected = self._world.jobs[job.id]
            expected.status, expected.attempt = "in_progress", expected.attempt + 1

    @precondition(lambda self: self._ids("in_progress"))
    @rule(pick=pick, step=st.integers(1, 4))
    def save_checkpoint(self, pick: int, step: int) -> None:
        job_id = self._running(pick)
        self._claims.set_checkpoint(self._claim_of(job_id), step)
        self._world.jobs[job_id].checkpoint_step = step

    @precondition(lambda self: self._ids("in_progress"))
    @rule(pick=pick)
    def complete(self, pick: int) -> None:
        job_id = self._running(pick)
        self._claims.complete(self._claim_of(job_id), result())
        self._end(job_id, "completed")

    @precondition(lambda self: self._ids("in_progress"))
    @rule(pick=pick)
    def fail(self, pick: int) -> None:
        job_id = self._running(pick)
        self._claims.fail(self._claim_of(job_id), JobError("deadline_exceeded", "too long", False))
        self._end(job_id, "failed")

    @precondition(lambda self: self._ids("in_progress"))
    @rule(pick=pick, is_death=st.booleans())
    def give_back(self, pick: int, is_death: bool) -> None:
        job_id = self._running(pick)
        claim, job = self._claim_of(job_id), self._world.jobs[job_id]
        if is_death:
            self._claims.lose(claim, "killed")
        else:
            self._claims.requeue(claim)
        if job.is_to_be_cancelled:
            self._end(job_id, "cancelled")
        elif job.losses + is_death >= MAX_LOSSES:
            self._end(job_id, "failed")
        else:
            job.status, job.losses = "queued", job.losses + is_death
            self._world.stale.append(claim)

    @precondition(lambda self: self._ids())
    @rule(pick=pick)
    def cancel(self, pick: int) -> None:
        job_id = self._any(pick)
        job = self._world.jobs[job_id]
        assert self._table.cancel(job_id, job.owner) is not None
        if job.status == "queued":
            self._end(job_id, "cancelled")
        elif job.status == "in_progress":
            job.is_to_be_cancelled = True

    @precondition(lambda self: self._ids())
    @rule(pick=pick)
    def delete(self, pick: int) -> None:
        job_id = self._any(pick)
        job = self._world.jobs.pop(job_id)
        assert self._table.delete(job_id, job.owner) is not None
        if job.status not in FINAL:
            self._world.ended["cancelled"] += 1
        self._world.stale.append(Claim(job_id, job.attempt))

    @rule(seconds=st.sampled_from((-7200.0, -1.0, 1.0, 600.0, 7200.0)))
    def let_the_clock_jump(self, seconds: float) -> None:
        self._world.now += seconds
        self._clock.stop_at(self._world.now)

    @rule()
    def sweep(self) -> None:
        expired = [job_id for job_id, job in self._world.jobs.items() if self._is_expired(job)]
        assert self._table.expired(self._world.now) == expired
        assert sorted(self._table.delete_expired(self._world.now)) == expired
        for job_id in expired:
            del self._world.jobs[job_id]

    @precondition(lambda self: self._world.stale)
    @rule(pick=pick, write=st.sampled_from(WRITES))
    def write_with_a_lost_claim(self, pick: int, write: Callable[[ClaimTable, Claim], object]) -> None:
        with pytest.raises(ClaimLostError):
            write(self._claims, self._world.stale[pick % len(self._world.stale)])

    @invariant()
    def the_table_says_what_was_promised(self) -> None:
        for job_id, expected in self._world.jobs.items():
            job = self._table.get(job_id, expected.owner)
            if self._is_expired(expected):
                assert job is None
                continue
            assert job is not None
            assert (job.status, job.attempt, job.losses) == (
                expected.status,
                expected.attempt,
                expected.losses,
            )
            assert (job.checkpoint_step, job.expires_at) == (expected.checkpoint_step, expected.expires_at)
            assert (job.completed_at is not None) == (job.status in FINAL)

    @invariant()
    def each_owner_sees_theirs(self) -> None:
        for owner in OWNERS:
            page = self._table.page(owner, after=None, limit=1000, order="asc", status=None)
            assert [job.id for job in page] == [
                job_id for job_id in self._ids() if self._world.jobs[job_id].owner == owner
            ]

    @invariant()
    def every_end_was_counted_once_and_told_once(self) -> None:
        counted = read_samples(self._database, observations.JOBS_TOTAL)
        assert {status: value for (_, status), value in counted.items()} == self._world.ended
        told = [webhook.job_id for webhook in WebhookTable(self._database).due(1e12)]
        assert sorted(told) == [
            job_id for job_id, job in self._world.jobs.items() if job.has_webhook and job.status in FINAL
        ]

    def _running(self, pick: int) -> str:
        running = self._ids("in_progress")
        return running[pick % len(running)]

    def _any(self, pick: int) -> str:
        ids = self._ids()
        return ids[pick % len(ids)]


JobTableMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestAnyHistory = JobTableMachine.TestCase


class PostgresMachine(JobTableMachine):
    """The same, and procrastinate's queue says of every job what the table says."""

    engine = "postgres"

    @invariant()
    def the_queue_agrees(self) -> None:
        assert disagreements(self._database) == []


PostgresMachine.TestCase.settings = settings(JobTableMachine.TestCase.settings, max_examples=6)


@pytest.fixture
def _machines_of(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PostgresMachine, "server", staticmethod(lambda: postgres))


@pytest.mark.usefixtures("_machines_of")
class TestAnyHistoryInPostgres(PostgresMachine.TestCase):  # type: ignore[misc, valid-type]
    """Fewer histories: each statement takes longer."""
