"""A file as an answer: whole or in part, or not again.

Knows: ETags, ranges and redirects to a store's own links. Does not know: jobs, or where files lie.
"""

from dataclasses import dataclass
from email.utils import formatdate

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from server.byte_ranges import ByteRange, RangeNotSatisfiableError, matches_etag, requested_range
from server.errors import ApiError
from server.storage.keys import ObjectKey
from server.storage.store import VideoStore


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that never changes under its name. ``name`` is what a browser saves it as."""

    key: ObjectKey
    bytes: int
    sha256: str
    content_type: str
    name: str
    modified_at: float


async def answer_with(request: Request, file: StoredFile, store: VideoStore) -> Response:
    """200, 206 or 304 to GET or HEAD. ETag is the file's SHA-256.

    A GET is answered with 307 if the store gives links, but with If-Range: the store has ETags of its own.

    Raises:
        ApiError: 410 the file is gone, or not whole; 416.
        StorageError: the store cannot be asked.
    """
    if await store.size(file.key) != file.bytes:
        raise ApiError(
            410, "file_missing", f"{file.name} is not in the server's storage any more, or not whole"
        )
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
    is_get = request.method == "GET"
    if is_get and "if-range" not in request.headers and (link := await store.link(file.key)):
        return Response(status_code=307, headers={"Location": link, "Cache-Control": "no-store"})
    return _send(file, part, headers, store if is_get else None)


def _send(
    file: StoredFile, part: ByteRange | None, headers: dict[str, str], store: VideoStore | None
) -> Response:
    """Without a store: the headers alone."""
    sent = part or ByteRange(0, file.bytes)
    headers |= {"Content-Length": str(sent.stop - sent.start)}
    if part is not None:
        headers |= {"Content-Range": f"bytes {part.start}-{part.stop - 1}/{file.bytes}"}
    status = 200 if part is None else 206
    if store is None:
        return Response(status_code=status, headers=headers, media_type=file.content_type)
    return StreamingResponse(store.read(file.key, sent), status, headers, media_type=file.content_type)
