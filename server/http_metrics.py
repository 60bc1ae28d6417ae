"""Metrics of the HTTP side, which live as long as this process.

Knows: routes by their templates. Does not know: jobs (server/observations.py).
"""

from prometheus_client import CollectorRegistry, Counter, Histogram

_METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "PUT", "PATCH", "OPTIONS"})


class HttpMetrics:
    """Counters and histograms in a registry of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._duration = Histogram(
            "reelwright_http_request_duration_seconds",
            "From the request's arrival to the end of its answer, by route template.",
            ("route", "method", "status"),
            registry=registry,
        )
        self._rejected = Counter(
            "reelwright_jobs_rejected", "Submissions that were refused.", ("reason",), registry=registry
        )

    def observe(self, route: str, method: str, status: int, seconds: float) -> None:
        """One finished request."""
        known_method = method if method in _METHODS else "other"
        self._duration.labels(route, known_method, str(status)).observe(seconds)

    def reject(self, reason: str) -> None:
        """One refused submission; ``reason`` is an error code."""
        self._rejected.labels(reason).inc()
