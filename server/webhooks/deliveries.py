"""The task that delivers what the job table says is due, in the API process.

Knows: due messages, how many at once, and what follows each outcome. Does not know: HTTP, or when a job ends:
the row is written by the transaction that ends it, so a message outlives a crash of any process, and is
delivered at least once.
"""

import asyncio
import json
import time
from datetime import UTC, datetime

import anyio
from fastapi.concurrency import run_in_threadpool

from server import logs
from server.database import Database, DatabaseError
from server.feed import ChangeFeed
from server.jobs import JobTable
from server.looking import look
from server.outage import Outage
from server.present import Presenter
from server.webhook_table import Webhook, WebhookTable
from server.webhooks.schedule import next_delay_seconds
from server.webhooks.sending import Outcome, Sender
from server.webhooks.signing import Signer

LOOK_SECONDS = 1.0
MAX_AT_ONCE = 16
MAX_AT_ONCE_PER_SITE = 4  # one slow receiver leaves room for the others


class Deliveries:
    """Starts with the API process and ends with it; a message that was on its way then is sent again."""

    def __init__(
        self,
        database: Database,
        table: WebhookTable,
        jobs: JobTable,
        presenter: Presenter,
        feed: ChangeFeed,
        sender: Sender,
        signer: Signer,
    ) -> None:
        self._database = database
        self._table = table
        self._jobs = jobs
        self._presenter = presenter
        self._feed = feed
        self._sender = sender
        self._signer = signer
        self._task: asyncio.Task[None] | None = None
        self._on_their_way: dict[str, tuple[str, asyncio.Task[None]]] = {}

    def start(self) -> None:
        """Begin; needs a running event loop."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop at once."""
        tasks = [task for _, task in self._on_their_way.values()]
        if self._task is not None:
            tasks.append(self._task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        outage = Outage()
        while True:
            change = self._feed.next_change()
            try:
                await self._start_due()
            except DatabaseError as error:
                outage.failed(error)
            else:
                outage.succeeded()
            with anyio.move_on_after(LOOK_SECONDS):
                await change.wait()

    async def _start_due(self) -> None:
        for webhook in await look(self._database, self._table.due, per_site=MAX_AT_ONCE_PER_SITE):
            if len(self._on_their_way) >= MAX_AT_ONCE:
                return
            sites = [site for site, _ in self._on_their_way.values()]
            if webhook.id not in self._on_their_way and sites.count(webhook.site) < MAX_AT_ONCE_PER_SITE:
                self._on_their_way[webhook.id] = (webhook.site, asyncio.create_task(self._deliver(webhook)))

    async def _deliver(self, webhook: Webhook) -> None:
        try:
            if await run_in_threadpool(self._table.lease, webhook.id):
                await self._record(webhook, await self._try(webhook))
        except DatabaseError as error:
            logs.get_logger().error("database_error", message=str(error))
            await asyncio.sleep(LOOK_SECONDS)  # it is still due
        finally:
            del self._on_their_way[webhook.id]

    async def _try(self, webhook: Webhook) -> Outcome:
        body = await look(self._database, self._body, webhook)
        if body is None:
            return Outcome("gone", "the job was deleted")
        headers = self._signer.headers(webhook.id, int(time.time()), body)
        return await self._sender.send(webhook.url, body, headers)

    def _body(self, webhook: Webhook) -> bytes | None:
        job = self._jobs.find(webhook.job_id)
        if job is None:
            return None
        message = {
            "type": webhook.event,
            "timestamp": datetime.fromtimestamp(webhook.created_at, UTC).isoformat().replace("+00:00", "Z"),
            "data": self._presenter.video(job).model_dump(mode="json"),
        }
        return json.dumps(message, separators=(",", ":")).encode()

    async def _record(self, webhook: Webhook, outcome: Outcome) -> None:
        tries = webhook.tries + 1
        delay = next_delay_seconds(tries) if outcome.kind == "failed" else None
        log = logs.get_logger().bind(job=webhook.job_id, webhook=webhook.id, tries=tries)
        if delay is not None:
            await run_in_threadpool(self._table.failed, webhook.id, delay)
            log.warning("webhook_failed", reason=outcome.detail, retry_seconds=round(delay))
        elif outcome.kind == "delivered":
            await run_in_threadpool(self._table.delivered, webhook.id)
            log.info("webhook_delivered")
        else:
            await run_in_threadpool(self._table.give_up, webhook.id)
            log.error("webhook_given_up", reason=outcome.detail)
