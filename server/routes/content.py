"""``/v1/videos/{id}/content``: the MP4 and its pictures."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response

from configs.job import JobResult, PictureFile
from server.auth import OwnerParam
from server.errors import ApiError
from server.file_answer import StoredFile, answer_with
from server.job import Job
from server.preview_picture import CONTENT_TYPE, read_preview
from server.schemas import ContentQuery
from server.services import Services, ServicesParam
from server.storage.keys import ObjectKey

router = APIRouter(tags=["videos"])


@router.head("/v1/videos/{video_id}/content", include_in_schema=False)
@router.get(
    "/v1/videos/{video_id}/content",
    response_class=Response,
    responses={
        200: {"content": {"video/mp4": {}, CONTENT_TYPE: {}}},
        206: {"description": "The bytes asked for with Range."},
        304: {"description": "The client has this file: If-None-Match."},
        307: {"description": "The file at the object store itself, if the server is set up so."},
    },
)
async def get_content(
    video_id: str,
    query: Annotated[ContentQuery, Query()],
    request: Request,
    services: ServicesParam,
    owner: OwnerParam,
) -> Response:
    """The finished MP4, or a picture of it.

    ETag is its SHA-256; Range, If-Range and If-None-Match are honoured.
    `variant=preview` is the newest picture of a job that runs; it changes, so none of these apply to it.
    """
    job = await run_in_threadpool(services.jobs.get, video_id, owner)
    if job is None:
        raise ApiError.video_not_found(video_id)
    if query.variant == "preview":
        return await _preview(services, job)
    if job.result is None:
        raise _nothing_there(job)
    return await answer_with(request, _stored(job, job.result, query.variant), services.store)


def _stored(job: Job, result: JobResult, variant: Literal["video", "thumbnail", "spritesheet"]) -> StoredFile:
    key, modified_at = ObjectKey(job.id, job.attempt, variant), job.completed_at or 0.0
    if variant == "video":
        made = result.file
        return StoredFile(key, made.bytes, made.sha256, "video/mp4", key.shown_name, modified_at)
    picture: PictureFile | None = result.thumbnail if variant == "thumbnail" else result.spritesheet
    if picture is None:
        raise ApiError(409, "no_content", f"video {job.id} was made without a {variant}")
    return StoredFile(key, picture.bytes, picture.sha256, picture.content_type, key.shown_name, modified_at)


async def _preview(services: Services, job: Job) -> Response:
    if job.is_final:
        raise ApiError(409, "no_content", f"video {job.id} is {job.status}: only a running job has a preview")
    jpeg = await read_preview(services.store, job)
    if jpeg is None:
        raise ApiError(409, "not_ready", f"video {job.id} is {job.status} and has no preview picture yet")
    return Response(jpeg, media_type=CONTENT_TYPE, headers={"Cache-Control": "no-store"})


def _nothing_there(job: Job) -> ApiError:
    message = f"video {job.id} is {job.status}" + (f": {job.error.message}" if job.error else "")
    return ApiError(409, "no_content" if job.is_final else "not_ready", message)
