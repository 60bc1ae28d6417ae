"""A file as an answer: whole or in part, or not again.

Knows: paths, ETags and ranges. Does not know: jobs.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

import anyio
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from server.byte_ranges import ByteRange, RangeNotSatisfiableError, matches_etag, requested_range
from server.errors import ApiError

CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that never changes under its name. ``name`` is what a browser saves it as."""

    path: Path
    bytes: int
    sha256: str
    content_type: str
    name: str
    modified_at: float

    @property
    def is_whole(self) -> bool:
        """Whether it lies on the disk as it was written."""
        try:
            return self.path.stat().st_size == self.bytes
        except OSError:
            return False


def answer_with(request: Request, file: StoredFile) -> Response:
    """200, 206 or 304 to GET or HEAD. ETag is the file's SHA-256. Raises ApiError: 416."""
    etag, last_modified = f'"{file.sha256}"', formatdate(file.modified_at, usegmt=True)
    headers = {
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Content-Disposition": f'inline; filename="{file.name}"',
        "ETag": etag,
        "Last-Modified": last_modified,
    }
    if matches_etag(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    try:
        part = requested_range(request.headers, file.bytes, etag, last_modified)
    except RangeNotSatisfiableError as error:
        unsatisfied = {"Content-Range": f"bytes */{file.bytes}"}
        raise ApiError(416, "range_not_satisfiable", str(error), headers=unsatisfied) from error
    return _send(file, part, headers, is_head=request.method == "HEAD")


def _send(file: StoredFile, part: ByteRange | None, headers: dict[str, str], *, is_head: bool) -> Response:
    sent = part or ByteRange(0, file.bytes)
    headers |= {"Content-Length": str(sent.stop - sent.start)}
    if part is not None:
        headers |= {"Content-Range": f"bytes {part.start}-{part.stop - 1}/{file.bytes}"}
    status = 200 if part is None else 206
    if is_head:
        return Response(status_code=status, headers=headers, media_type=file.content_type)
    return StreamingResponse(_read(file.path, sent), status, headers, media_type=file.content_type)


async def _read(path: Path, part: ByteRange) -> AsyncIterator[bytes]:
    async with await anyio.open_file(path, "rb") as file:
        await file.seek(part.start)
        left = part.stop - part.start
        while left > 0 and (chunk := await file.read(min(CHUNK_BYTES, left))):
            left -= len(chunk)
            yield chunk
