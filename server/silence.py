"""How long another process has been silent.

Knows: the clock. Does not know: who is silent.
"""

import time

LONGEST_LOOK_SECONDS = 2.0


class Silence:
    """Counts while its owner looks: a pause of the whole machine, in which nobody looked, hardly counts."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked_at = time.monotonic()

    def broken(self) -> None:
        """Something was heard."""
        self._seconds = 0.0

    def look(self) -> float:
        """Seconds of silence up to now."""
        now = time.monotonic()
        self._seconds += min(now - self._looked_at, LONGEST_LOOK_SECONDS)
        self._looked_at = now
        return self._seconds
