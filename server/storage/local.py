"""The data folder as a store: what ``reelwright serve`` uses by default.

Knows: that an object's name is its path below the folder. Does not know: jobs.
"""

from collections.abc import AsyncIterator

import anyio
from anyio.to_thread import run_sync

from server.byte_ranges import ByteRange
from server.files import DataFolder
from server.storage.keys import ObjectKey

CHUNK_BYTES = 256 * 1024


class LocalStore:
    """Implements VideoStore."""

    def __init__(self, folder: DataFolder) -> None:
        self._folder = folder

    async def size(self, key: ObjectKey) -> int | None:
        try:
            return (await run_sync((self._folder.root / str(key)).stat)).st_size
        except OSError:
            return None

    async def read(self, key: ObjectKey, part: ByteRange) -> AsyncIterator[bytes]:
        async with await anyio.open_file(self._folder.root / str(key), "rb") as file:
            await file.seek(part.start)
            left = part.stop - part.start
            while left > 0 and (chunk := await file.read(min(CHUNK_BYTES, left))):
                left -= len(chunk)
                yield chunk

    async def link(self, key: ObjectKey) -> str | None:
        return None

    async def preview(self, job_id: str, attempt: int) -> bytes | None:
        try:
            return await run_sync(self._folder.preview(job_id).read_bytes)
        except OSError:
            return None

    async def remove(self, job_id: str) -> None:
        await run_sync(self._folder.remove, job_id)
