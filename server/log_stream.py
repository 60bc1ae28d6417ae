"""Standard error that never stops the work.

Knows: that a write can fail (a full disk, a closed pipe, a closed file). Does not know: what is written.
"""

from contextlib import suppress
from typing import TextIO


class LossyStream:
    """Loses what cannot be written: a log line is not worth a job or a process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or do not."""
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or do not."""
        with suppress(OSError, ValueError):
            self._stream.flush()
