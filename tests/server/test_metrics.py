"""The Prometheus view of the tables."""

import dataclasses
import time

import pytest
from prometheus_client import CollectorRegistry

from server.claims import ClaimTable
from server.database import Database
from server.jobs import JobTable
from server.metrics import JobCollector
from server.webhook_table import WebhookTable
from server.workers import WorkerReport, WorkerTable
from tests.server.databases import Clock
from tests.server.samples import new_job, result
from tests.server.test_jobs import claim_of

REPORT = WorkerReport(
    name="local",
    state="ready",
    message="",
    model="tiny-wan",
    device="cuda:0",
    dtype="bfloat16",
    load_seconds=1.0,
    supervisor_pid=1,
    worker_pid=2,
    gpus=2,
    memory_total_bytes=2_000,
    memory_in_use_bytes={"cuda:0": 1_500, "cuda:1": 1_700},
    files=None,
)


@pytest.fixture
def registry(database: Database) -> CollectorRegistry:
    """What /metrics shows of that database."""
    registry = CollectorRegistry()
    registry.register(JobCollector(database, "tiny-wan"))
    return registry


def test_memory_in_use_is_that_of_each_device(registry: CollectorRegistry, database: Database) -> None:
    workers = WorkerTable(database)
    workers.report(dataclasses.replace(REPORT, device=None, memory_in_use_bytes=None))
    name, labels = "reelwright_memory_in_use_bytes", {"worker": "local", "device": "cuda:0"}
    assert registry.get_sample_value(name, labels) is None
    workers.report(REPORT)
    assert registry.get_sample_value(name, labels) == 1_500
    assert registry.get_sample_value(name, labels | {"device": "cuda:1"}) == 1_700
    assert registry.get_sample_value("reelwright_worker_up", {"model": "tiny-wan"}) == 1


def test_no_age_is_negative_after_a_clock_jump(
    registry: CollectorRegistry, jobs: JobTable, claims: ClaimTable, clock: Clock
) -> None:
    jobs.submit(new_job())
    jobs.submit(new_job())
    clock.shift(-7200)
    age = registry.get_sample_value("reelwright_oldest_queued_age_seconds", {"model": "tiny-wan"})
    assert age == 0.0
    claims.claim("tiny-wan")
    waited = registry.get_sample_value("reelwright_job_queue_wait_seconds_sum", {"model": "tiny-wan"})
    assert waited == 0.0
    clock.shift(2 * 7200)
    age = registry.get_sample_value("reelwright_oldest_queued_age_seconds", {"model": "tiny-wan"})
    assert age == pytest.approx(2 * 7200, abs=60)


def test_webhooks_are_counted_by_result(
    registry: CollectorRegistry, jobs: JobTable, claims: ClaimTable, database: Database
) -> None:
    jobs.submit(new_job(webhook_url="https://example.com/hook"))
    claims.complete(claim_of(claims.claim("tiny-wan")), result())
    table = WebhookTable(database)
    (webhook,) = table.due(time.time())
    table.failed(webhook.id, time.time())
    table.delivered(webhook.id)
    for outcome, count in {"failed": 1, "delivered": 1, "given_up": None}.items():
        found = registry.get_sample_value("reelwright_webhooks_total", {"result": outcome})
        assert found == count


def test_jobs_that_no_worker_takes_are_counted(
    registry: CollectorRegistry, jobs: JobTable, database: Database
) -> None:
    def unserved() -> float | None:
        gpus = "any" if jobs.gpus is None else str(jobs.gpus)
        labels = {"model": "tiny-wan", "gpus": gpus}
        return registry.get_sample_value("reelwright_jobs_unserved", labels)

    assert unserved() == 0
    jobs.submit(new_job())
    assert unserved() == 1
    WorkerTable(database).report(dataclasses.replace(REPORT, gpus=jobs.gpus or 1))
    assert unserved() == 0
