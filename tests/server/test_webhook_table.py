"""Undelivered webhooks: due when they should be, settled once, gone with their job."""

import pytest

from server import observations
from server.claims import ClaimTable
from server.database import Database
from server.jobs import JobTable
from server.observations import read_samples
from server.webhook_table import MAX_DUE, Webhook, WebhookTable
from tests.server.databases import Clock
from tests.server.samples import new_job, result
from tests.server.test_jobs import claim_of

URL = "https://example.com/hook"


@pytest.fixture
def table(database: Database) -> WebhookTable:
    """The webhooks of that database."""
    return WebhookTable(database)


@pytest.fixture
def webhook(jobs: JobTable, claims: ClaimTable, table: WebhookTable) -> Webhook:
    """That of a job which has just completed."""
    jobs.submit(new_job(webhook_url=URL))
    claims.complete(claim_of(claims.claim("tiny-wan")), result())
    (webhook,) = table.due()
    assert webhook.id.startswith("msg_")
    assert webhook.tries == 0
    return webhook


def test_a_delivered_webhook_is_gone_and_counted_once(
    table: WebhookTable, webhook: Webhook, database: Database
) -> None:
    assert table.delivered(webhook.id)
    assert not table.delivered(webhook.id)
    assert table.due(1e12) == []
    assert read_samples(database, observations.WEBHOOKS_TOTAL) == {("delivered",): 1.0}


def test_a_failed_webhook_waits_for_its_next_try(
    table: WebhookTable, webhook: Webhook, database: Database
) -> None:
    assert table.failed(webhook.id, 60)
    (again,) = table.due(1e12)
    assert again.next_try_at == pytest.approx(again.tried_at + 60)
    assert table.due(again.next_try_at - 1) == []
    assert [row.id for row in table.due(again.next_try_at)] == [webhook.id]
    assert (again.id, again.tries, again.created_at) == (webhook.id, 1, webhook.created_at)
    assert table.give_up(webhook.id)
    assert not table.failed(webhook.id, 1)
    assert read_samples(database, observations.WEBHOOKS_TOTAL) == {("failed",): 1.0, ("given_up",): 1.0}


def test_a_clock_that_is_set_back_makes_it_due_once(
    table: WebhookTable, webhook: Webhook, clock: Clock
) -> None:
    table.failed(webhook.id, 3600)
    earlier = webhook.created_at - 86_400
    clock.stop_at(earlier)
    assert [row.id for row in table.due(earlier)] == [webhook.id]
    table.failed(webhook.id, 3600)
    assert table.due(earlier) == []
    assert [row.id for row in table.due(earlier + 3600)] == [webhook.id]


def test_many_webhooks_of_one_site_hide_no_other(jobs: JobTable, table: WebhookTable) -> None:
    slow = [
        "https://slow.example",
        "https://SLOW.example/",
        "https://slow.example?a",
        "https://slow.example#a",
    ]
    slow += [f"https://slow.example/{number}" for number in range(MAX_DUE)]
    others = ["https://slow.example:8443/", "https://example.com/https://slow.example/"]
    for url in (*slow, *others):
        jobs.cancel(jobs.submit(new_job(webhook_url=url)).job.id)
    due = table.due(per_site=3)
    assert [row.url for row in due] == [*slow[:3], *others]
    assert [row.site for row in due] == [*["slow.example"] * 3, "slow.example:8443", "example.com"]


def test_deleting_a_job_drops_its_webhook(jobs: JobTable, table: WebhookTable, webhook: Webhook) -> None:
    jobs.cancel(jobs.submit(new_job(webhook_url=URL)).job.id)
    jobs.delete(webhook.job_id)
    (kept,) = table.due()
    assert kept.event == "video.cancelled"


def test_an_expired_job_takes_its_webhook_along(database: Database, table: WebhookTable) -> None:
    jobs = JobTable(database, retention_seconds=60)
    jobs.cancel(jobs.submit(new_job(webhook_url=URL)).job.id)
    assert jobs.delete_expired() == []
    assert len(table.due()) == 1
    assert len(jobs.delete_expired(1e12)) == 1
    assert table.due(1e12) == []
