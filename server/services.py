"""What the routes work with, made once per API process.

Knows: the parts. Does not know: how they work, or HTTP.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from prometheus_client import CollectorRegistry

from configs.attention import AttentionConfig
from configs.model_preset import ModelPreset
from configs.settings import Settings
from server.database import Database
from server.feed import ChangeFeed
from server.http_metrics import HttpMetrics
from server.jobs import JobTable, QueueLimits
from server.metrics import JobCollector
from server.present import Presenter
from server.remote_workers import RemoteWorkers
from server.snapshots import Snapshots
from server.staffing import Staff
from server.storage.store import VideoStore
from server.supervisor_handle import SupervisorHandle
from server.webhook_table import WebhookTable
from server.webhooks.deliveries import Deliveries
from server.webhooks.destination import DestinationRules
from server.webhooks.sending import Sender
from server.webhooks.signing import Signer
from server.workers import Worker, WorkerTable


@dataclass(frozen=True, slots=True)
class Services:
    """The API process in parts. ``attention`` is what a request starts from; ``deliveries`` is
    None on a server that sends no webhooks."""

    settings: Settings
    preset: ModelPreset
    attention: AttentionConfig
    store: VideoStore
    database: Database
    supervisor: SupervisorHandle | RemoteWorkers
    jobs: JobTable
    workers: WorkerTable
    presenter: Presenter
    feed: ChangeFeed
    snapshots: Snapshots
    registry: CollectorRegistry
    http_metrics: HttpMetrics
    deliveries: Deliveries | None
    started_at: float = field(default_factory=time.time)

    def worker(self) -> Worker | None:
        """A worker for these jobs, or None before the first report of one. Of several that take jobs, the one
        with the least memory: a job may come to any of them."""
        found = [worker for worker in self.workers.all() if self.is_for_us(worker)]
        ready = [worker for worker in found if worker.is_ready]
        if ready:
            return min(ready, key=lambda worker: worker.memory_total_bytes or math.inf)
        return max(found, key=lambda worker: worker.heartbeat_at, default=None)

    def staff(self) -> Staff:
        """The living workers. Raises DatabaseError."""
        return Staff(self.workers.all())

    def is_for_us(self, worker: Worker) -> bool:
        """Whether it takes the jobs that are put here: it has their model, and as many GPUs."""
        return (worker.model, worker.gpus) == (self.preset.name, self.settings.gpus)


def build_services(
    settings: Settings,
    preset: ModelPreset,
    attention: AttentionConfig,
    database: Database,
    store: VideoStore,
    supervisor: SupervisorHandle | RemoteWorkers,
) -> Services:
    """Put the parts together. Nothing is started."""
    limits = QueueLimits(settings.max_queued_jobs, settings.max_jobs_per_key)
    jobs = JobTable(database, limits, settings.retention_seconds)
    workers = WorkerTable(database)
    presenter = Presenter(jobs, workers)
    feed = ChangeFeed(database)
    registry = CollectorRegistry()
    registry.register(JobCollector(database, preset.name))
    return Services(
        settings=settings,
        preset=preset,
        attention=attention,
        store=store,
        database=database,
        supervisor=supervisor,
        jobs=jobs,
        workers=workers,
        presenter=presenter,
        feed=feed,
        snapshots=Snapshots(database, jobs, presenter, feed),
        registry=registry,
        http_metrics=HttpMetrics(registry),
        deliveries=_deliveries(settings, database, jobs, presenter, feed),
    )


def _deliveries(
    settings: Settings, database: Database, jobs: JobTable, presenter: Presenter, feed: ChangeFeed
) -> Deliveries | None:
    if settings.webhook_secret is None:
        return None
    sender = Sender(DestinationRules.of(settings))
    signer = Signer(settings.webhook_secret)
    return Deliveries(database, WebhookTable(database), jobs, presenter, feed, sender, signer)


def _services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesParam = Annotated[Services, Depends(_services_of)]
