"""The time in which the job database does not answer.

Knows: when it began and when to ask again. Does not know: what there is to be written.
"""

import time

from server import logs

RETRY_SECONDS = 1.0


class Outage:
    """Begins with a failure, ends with a success; both are logged once."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._retry_at = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the database was away when it was last asked."""
        return self._began_at is not None

    @property
    def is_due(self) -> bool:
        """Whether it may be asked now."""
        return time.monotonic() >= self._retry_at

    @property
    def seconds_to_retry(self) -> float:
        """Until it may be asked again; 0: now."""
        return max(0.0, self._retry_at - time.monotonic())

    def failed(self, error: Exception) -> None:
        """It did not answer."""
        if self._began_at is None:
            self._began_at = time.monotonic()
            logs.get_logger().error("database_away", message=str(error))
        self._retry_at = time.monotonic() + RETRY_SECONDS

    def succeeded(self) -> None:
        """It answers."""
        if self._began_at is not None:
            seconds = time.monotonic() - self._began_at
            logs.get_logger().info("database_back", seconds=round(seconds, 1))
        self._began_at, self._retry_at = None, 0.0
