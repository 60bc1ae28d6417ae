"""What the HTTP side needs of a store, whichever it is.

Knows: the questions. Does not know: the answers (local.py, objects.py), or jobs.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from server.byte_ranges import ByteRange
from server.storage.keys import ObjectKey


class StorageError(Exception):
    """The store cannot be reached, or refuses; the message is for the operator, in one line."""


class VideoStore(Protocol):
    """Finished files and previews. Every call may come from any API process."""

    async def size(self, key: ObjectKey) -> int | None:
        """Bytes of a file, None when it is not there. Raises StorageError."""
        ...

    def read(self, key: ObjectKey, part: ByteRange) -> AsyncIterator[bytes]:
        """A part of a file in pieces of bounded size. Closing the iterator ends the reading."""
        ...

    async def link(self, key: ObjectKey) -> str | None:
        """A URL from which a client can GET the file itself for a while; None: this server sends it."""
        ...

    async def preview(self, job_id: str, attempt: int) -> bytes | None:
        """The newest preview of a running attempt, None when there is none, or none to be had now."""
        ...

    async def remove(self, job_id: str) -> None:
        """Remove everything of a job. What cannot be removed is logged, and found by a sweep."""
        ...
