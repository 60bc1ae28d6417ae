"""The Prometheus view of the job table and of what was observed there.

Knows: the exposition format. Does not know: who observed what, or when.
"""

import platform
from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from server import observations
from server.database import Database
from server.jobs import JobTable, QueueCounts
from server.observations import read_buckets, read_samples
from server.staffing import Staff
from server.version import package_version
from server.workers import WorkerTable

PREFIX = "reelwright_"


class JobCollector(Collector):
    """Reads the database at each scrape, so every API process shows the same numbers."""

    def __init__(self, database: Database, model: str) -> None:
        self._database = database
        self._jobs = JobTable(database)
        self._workers = WorkerTable(database)
        self._model = model

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read the database."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Every metric that the database knows."""
        yield from self._queue()
        yield from self._worker()
        yield self._build_info()
        yield from self._counters_and_gauges()
        yield from self._histograms()

    def _queue(self) -> Iterator[Metric]:
        counts = {self._model: QueueCounts()} | self._jobs.counts()
        queued = GaugeMetricFamily(f"{PREFIX}jobs_queued", "Jobs that wait.", labels=["model"])
        running = GaugeMetricFamily(f"{PREFIX}jobs_running", "Jobs in progress.", labels=["model"])
        oldest = GaugeMetricFamily(
            f"{PREFIX}oldest_queued_age_seconds", "Age of the oldest queued job.", labels=["model"]
        )
        for model, found in sorted(counts.items()):
            queued.add_metric([model], found.queued)
            running.add_metric([model], found.running)
            age = found.oldest_age_seconds or 0.0
            oldest.add_metric([model], max(0.0, age))  # a clock that was set back makes nothing younger
        unserved = GaugeMetricFamily(
            f"{PREFIX}jobs_unserved", "Queued jobs that no living worker takes.", labels=["model", "gpus"]
        )
        staff = Staff(self._workers.all())
        alone = {(self._model, self._jobs.gpus): 0}
        for waiting in self._jobs.waiting():
            is_served = bool(staff.of(waiting.model, waiting.gpus))
            alone[waiting.model, waiting.gpus] = 0 if is_served else waiting.count
        for (model, gpus), count in alone.items():
            unserved.add_metric([model, "any" if gpus is None else str(gpus)], count)
        yield from (queued, running, oldest, unserved)

    def _worker(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(f"{PREFIX}worker_up", "Workers that take jobs.", labels=["model"])
        memory = GaugeMetricFamily(
            f"{PREFIX}memory_in_use_bytes",
            "Memory in use on the device; of the worker's processes on a CPU.",
            labels=["worker", "device"],
        )
        workers = self._workers.all()
        for model in sorted({self._model} | {worker.model for worker in workers}):
            up.add_metric([model], sum(worker.is_ready for worker in workers if worker.model == model))
        for worker in workers:
            in_use = worker.memory_in_use_bytes if worker.is_alive else None
            for device, used in (in_use or {}).items():
                memory.add_metric([worker.name, device], used)
        yield from (up, memory)

    def _build_info(self) -> Metric:
        family = GaugeMetricFamily(f"{PREFIX}build_info", "Always 1.", labels=["version", "python"])
        family.add_metric([package_version(), platform.python_version()], 1.0)
        return family

    def _counters_and_gauges(self) -> Iterator[Metric]:
        for metric in observations.COUNTERS:
            counter = CounterMetricFamily(PREFIX + metric.name, metric.help, labels=metric.labels)
            for labels, value in read_samples(self._database, metric).items():
                counter.add_metric(labels, value)
            yield counter
        for metric in observations.GAUGES:
            gauge = GaugeMetricFamily(PREFIX + metric.name, metric.help, labels=metric.labels)
            for labels, value in read_samples(self._database, metric).items():
                gauge.add_metric(labels, value)
            yield gauge

    def _histograms(self) -> Iterator[Metric]:
        for histogram in observations.HISTOGRAMS:
            family = HistogramMetricFamily(PREFIX + histogram.name, histogram.help, labels=histogram.labels)
            sums = read_samples(self._database, histogram)
            for labels, buckets in read_buckets(self._database, histogram).items():
                named = [("+Inf" if bound == float("inf") else str(bound), float(n)) for bound, n in buckets]
                family.add_metric(labels, named, sums[labels])
            yield family
