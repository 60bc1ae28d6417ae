"""``/v1/stats`` and ``/metrics``: measured facts, for people and for Prometheus."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from server.job import Job
from server.jobs import QueueCounts
from server.schemas import ModelStats, QueueStats, Stats, WorkerStats
from server.services import Services, ServicesParam
from server.version import package_version
from server.workers import Worker

router = APIRouter(tags=["operation"])

NEWEST_JOBS = 50


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def get_metrics(services: ServicesParam) -> Response:
    """Prometheus text."""
    return Response(generate_latest(services.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/stats")
def get_stats(services: ServicesParam) -> Stats:
    """Step times, memory, queue and attention densities, per model."""
    models = {services.preset.name: QueueCounts()} | services.jobs.counts()
    queues = _queue_stats(services)
    return Stats(
        version=package_version(),
        models=[
            _model_stats(services, model, counts, queues[model]) for model, counts in sorted(models.items())
        ],
    )


def _queue_stats(services: Services) -> defaultdict[str, list[QueueStats]]:
    staff = services.staff()
    found: defaultdict[str, list[QueueStats]] = defaultdict(list)
    for waiting in services.jobs.waiting():
        found[waiting.model].append(
            QueueStats(
                gpus=waiting.gpus,
                queued=waiting.count,
                oldest_queued_age_seconds=waiting.oldest_age_seconds,
                workers=len(staff.of(waiting.model, waiting.gpus)),
                waiting_reason=staff.waiting_reason(waiting.model, waiting.gpus),
            )
        )
    return found


def _model_stats(services: Services, model: str, counts: QueueCounts, queues: list[QueueStats]) -> ModelStats:
    newest = services.jobs.recent_completed(model, NEWEST_JOBS)
    worker = services.worker() if model == services.preset.name else None
    results = [job.result for job in newest if job.result]
    last = results[0] if results else None
    steps = [result.metrics.step_seconds.median for result in results if result.metrics.step_seconds]
    totals = [result.metrics.total_seconds for result in results]
    return ModelStats(
        model=model,
        worker=_worker_stats(worker) if worker else None,
        workers=[_worker_stats(worker) for worker in services.workers.all() if worker.model == model],
        queued=counts.queued,
        running=counts.running,
        oldest_queued_age_seconds=counts.oldest_age_seconds,
        queues=queues,
        completed_jobs_seen=len(results),
        last_step_seconds=newest[0].last_step_seconds if newest else None,
        median_step_seconds=median(steps) if steps else None,
        last_total_seconds=last.metrics.total_seconds if last else None,
        median_total_seconds=median(totals) if totals else None,
        last_peak_memory_bytes=last.metrics.peak_memory_bytes if last else None,
        last_attention=last.attention if last else None,
        density_by_backend=_densities(newest),
    )


def _worker_stats(worker: Worker) -> WorkerStats:
    return WorkerStats(
        name=worker.name,
        state=worker.state,
        message=worker.message,
        device=worker.device,
        dtype=worker.dtype,
        gpus=worker.gpus,
        load_seconds=worker.load_seconds,
        supervisor_pid=worker.supervisor_pid,
        worker_pid=worker.worker_pid,
        heartbeat_age_seconds=round(max(0.0, worker.heartbeat_age_seconds), 3),
    )


def _densities(newest: Sequence[Job]) -> dict[str, float]:
    # Oldest first, so that the newest job of each backend stays.
    return {
        job.result.attention.backend: job.result.attention.density for job in reversed(newest) if job.result
    }
