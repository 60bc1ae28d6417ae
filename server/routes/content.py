"""``/v1/videos/{id}/content``: the MP4, whole or in part."""

from collections.abc import AsyncIterator
from email.utils import formatdate
from pathlib import Path
from typing import Annotated

import anyio
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse

from configs.job import VideoFile
from server.auth import OwnerParam
from server.byte_ranges import ByteRange, RangeNotSatisfiableError, matches_etag, requested_range
from server.errors import ApiError
from server.job import Job
from server.schemas import ContentQuery
from server.services import Services, ServicesParam

router = APIRouter(tags=["videos"])

CHUNK_BYTES = 256 * 1024


@router.head("/v1/videos/{video_id}/content", include_in_schema=False)
@router.get(
    "/v1/videos/{video_id}/content",
    response_class=Response,
    responses={
        200: {"content": {"video/mp4": {}}},
        206: {"description": "The bytes asked for with Range."},
        304: {"description": "The client has this file: If-None-Match."},
    },
)
def get_content(
    video_id: str,
    query: Annotated[ContentQuery, Query()],
    request: Request,
    services: ServicesParam,
    owner: OwnerParam,
) -> Response:
    """The finished MP4. ETag is its SHA-256; Range, If-Range and If-None-Match are honoured."""
    job, file = _finished(services, video_id, owner)
    path = services.files.video(job.id, job.attempt)
    if _size_of(path) != file.bytes:
        raise ApiError(410, "file_missing", f"the whole file of video {job.id} is not on the server's disk")
    etag, last_modified = f'"{file.sha256}"', formatdate(job.completed_at, usegmt=True)
    headers = {
        "Accept-Ranges": "bytes",
        "Cache-Control": "private, no-cache",
        "Content-Disposition": f'inline; filename="{job.id}.mp4"',
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
    return _send(path, file.bytes, part, headers, is_head=request.method == "HEAD")


def _finished(services: Services, video_id: str, owner: str | None) -> tuple[Job, VideoFile]:
    job = services.jobs.get(video_id, owner)
    if job is None:
        raise ApiError.video_not_found(video_id)
    if job.result is None:
        message = f"video {job.id} is {job.status}" + (f": {job.error.message}" if job.error else "")
        raise ApiError(409, "not_ready" if not job.is_final else "no_content", message)
    return job, job.result.file


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _send(
    path: Path, size: int, part: ByteRange | None, headers: dict[str, str], *, is_head: bool
) -> Response:
    sent = part or ByteRange(0, size)
    headers |= {"Content-Length": str(sent.stop - sent.start)}
    if part is not None:
        headers |= {"Content-Range": f"bytes {part.start}-{part.stop - 1}/{size}"}
    status = 200 if part is None else 206
    if is_head:
        return Response(status_code=status, headers=headers, media_type="video/mp4")
    return StreamingResponse(_read(path, sent), status, headers, media_type="video/mp4")


async def _read(path: Path, part: ByteRange) -> AsyncIterator[bytes]:
    async with await anyio.open_file(path, "rb") as file:
        await file.seek(part.start)
        left = part.stop - part.start
        while left > 0 and (chunk := await file.read(min(CHUNK_BYTES, left))):
            left -= len(chunk)
            yield chunk
