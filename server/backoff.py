"""When to try again after failures in a row.

Knows: the clock. Does not know: what is tried.
"""

import time


class Backoff:
    """The first failure is retried at once, the next ones after 1, 2, 4, ... seconds."""

    def __init__(self, longest_seconds: float) -> None:
        self._longest_seconds = longest_seconds
        self.failures = 0
        self.next_try_at = time.monotonic()

    def failed(self) -> float:
        """Count a failure; returns the seconds until the next try."""
        self.failures += 1
        exponent = min(self.failures - 2, 20)
        seconds = 0.0 if exponent < 0 else min(self._longest_seconds, 2.0**exponent)
        self.next_try_at = time.monotonic() + seconds
        return seconds

    def succeeded(self) -> None:
        """Start over."""
        self.failures = 0
