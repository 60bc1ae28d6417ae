"""Measured values that outlive processes: counters, gauges and histograms in the job database.

Knows: metric names, labels, buckets, and how to write one observation inside the caller's transaction.
Does not know: what is measured, or the Prometheus text format (server/metrics.py).
"""

import json
import math
from bisect import bisect_left
from dataclasses import dataclass

from server.database import Connection, Database, read_statements

_SQL = read_statements("observations.sql")

LONG_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
STEP_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60)


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter or a gauge."""

    name: str
    help: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """A histogram; ``buckets`` are upper bounds, the last one (infinity) is implied."""

    buckets: tuple[float, ...]


JOBS_TOTAL = Metric("jobs", "Jobs that ended, by how.", ("model", "status"))
ATTENTION_CALLS = Metric(
    "attention_calls",
    "Self-attention calls of completed jobs: sparse or dense, why dense, by what, in which precision.",
    ("model", "backend", "kind", "reason", "implementation", "precision"),
)
WEBHOOKS_TOTAL = Metric("webhooks", "Tries to deliver a webhook, by what came of them.", ("result",))
QUEUE_WAIT = Histogram(
    "job_queue_wait_seconds", "From submission to the first claim.", ("model",), LONG_BUCKETS
)
JOB_DURATION = Histogram(
    "job_duration_seconds", "From the last claim to the end.", ("model", "status"), LONG_BUCKETS
)
STAGE_DURATION = Histogram(
    "stage_duration_seconds", "Time in one stage of a job.", ("model", "stage"), LONG_BUCKETS
)
STEP_DURATION = Histogram(
    "denoise_step_duration_seconds", "One denoise step.", ("model", "attention"), STEP_BUCKETS
)
MODEL_LOAD = Histogram("model_load_duration_seconds", "Loading the model.", ("model",), LONG_BUCKETS)
PEAK_MEMORY = Metric("peak_memory_bytes", "Peak memory of the last job.", ("model", "device"))
DENSITY = Metric("attention_density", "Attended share of token pairs in the last job.", ("model", "backend"))
REALTIME = Metric("realtime_factor", "Seconds of clip per second of work, last job.", ("model",))

COUNTERS = (JOBS_TOTAL, ATTENTION_CALLS, WEBHOOKS_TOTAL)
GAUGES = (PEAK_MEMORY, DENSITY, REALTIME)
HISTOGRAMS = (QUEUE_WAIT, JOB_DURATION, STAGE_DURATION, STEP_DURATION, MODEL_LOAD)


def count(connection: Connection, metric: Metric, *labels: str, times: int = 1) -> None:
    """Add to a counter."""
    connection.run(_SQL["add"], _sample(metric, labels, float(times)))


def set_gauge(connection: Connection, metric: Metric, value: float, *labels: str) -> None:
    """Set a gauge."""
    connection.run(_SQL["set"], _sample(metric, labels, value))


def observe(connection: Connection, histogram: Histogram, value: float, *labels: str) -> None:
    """Add one value to a histogram; a clock that was set back makes no negative durations."""
    value = max(0.0, value)
    sample = _sample(histogram, labels, value)
    connection.run(_SQL["add"], sample)
    position = bisect_left(histogram.buckets, value)
    bound = histogram.buckets[position] if position < len(histogram.buckets) else math.inf
    connection.run(_SQL["add_to_bucket"], sample | {"upper_bound": bound})


def read_samples(database: Database, metric: Metric) -> dict[tuple[str, ...], float]:
    """Value by label values."""
    with database.read() as connection:
        rows = connection.all(_SQL["samples"], {"metric": metric.name})
    return {tuple(json.loads(row["labels"])): row["value"] for row in rows}


def read_buckets(database: Database, histogram: Histogram) -> dict[tuple[str, ...], list[tuple[float, int]]]:
    """Cumulative ``(upper bound, count)`` pairs by label values, ending with the infinite bound."""
    with database.read() as connection:
        rows = connection.all(_SQL["buckets"], {"metric": histogram.name})
    counts: dict[tuple[str, ...], dict[float, int]] = {}
    for row in rows:
        counts.setdefault(tuple(json.loads(row["labels"])), {})[row["upper_bound"]] = row["count"]
    bounds = (*histogram.buckets, math.inf)
    return {
        labels: [(b, sum(n for bound, n in found.items() if bound <= b)) for b in bounds]
        for labels, found in counts.items()
    }


def _sample(metric: Metric, labels: tuple[str, ...], value: float) -> dict[str, str | float]:
    if len(labels) != len(metric.labels):
        raise ValueError(f"{metric.name} has labels {metric.labels}, got {labels}")
    return {"metric": metric.name, "labels": json.dumps(labels), "value": value}
