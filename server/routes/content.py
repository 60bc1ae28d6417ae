"""``/v1/videos/{id}/content``: the MP4 and its pictures."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from configs.job import JobResult, PictureFile
from server.auth import OwnerParam
from server.errors import ApiError
from server.file_answer import StoredFile, answer_with
from server.files import DataFolder
from server.job import Job
from server.preview_picture import CONTENT_TYPE, read_preview
from server.schemas import ContentQuery
from server.services import Services, ServicesParam

router = APIRouter(tags=["videos"])


@router.head("/v1/videos/{video_id}/content", include_in_schema=False)
@router.get(
    "/v1/videos/{video_id}/content",
    response_class=Response,
    responses={
        200: {"content": {"video/mp4": {}, CONTENT_TYPE: {}}},
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
    """The finished MP4, or a picture of it.

    ETag is its SHA-256; Range, If-Range and If-None-Match are honoured.
    `variant=preview` is the newest picture of a job that runs; it changes, so none of these apply to it.
    """
    job = services.jobs.get(video_id, owner)
    if job is None:
        raise ApiError.video_not_found(video_id)
    if query.variant == "preview":
        return _preview(services, job)
    if job.result is None:
        raise _nothing_there(job)
    file = _stored(services.files, job, job.result, query.variant)
    if not file.is_whole:
        raise ApiError(410, "file_missing", f"{file.name} is not on the server's disk any more, or not whole")
    return answer_with(request, file)


def _stored(
    files: DataFolder, job: Job, result: JobResult, variant: Literal["video", "thumbnail", "spritesheet"]
) -> StoredFile:
    if variant == "video":
        path, made = files.video(job.id, job.attempt), result.file
        return StoredFile(
            path, made.bytes, made.sha256, "video/mp4", f"{job.id}.mp4", job.completed_at or 0.0
        )
    picture: PictureFile | None
    if variant == "thumbnail":
        path, picture = files.thumbnail(job.id, job.attempt), result.thumbnail
    else:
        path, picture = files.spritesheet(job.id, job.attempt), result.spritesheet
    if picture is None:
        raise ApiError(409, "no_content", f"video {job.id} was made without a {variant}")
    name = f"{job.id}.{variant}.jpg"
    return StoredFile(
        path, picture.bytes, picture.sha256, picture.content_type, name, job.completed_at or 0.0
    )


def _preview(services: Services, job: Job) -> Response:
    if job.is_final:
        raise ApiError(409, "no_content", f"video {job.id} is {job.status}: only a running job has a preview")
    jpeg = read_preview(services.files, job)
    if jpeg is None:
        raise ApiError(409, "not_ready", f"video {job.id} is {job.status} and has no preview picture yet")
    return Response(jpeg, media_type=CONTENT_TYPE, headers={"Cache-Control": "no-store"})


def _nothing_there(job: Job) -> ApiError:
    message = f"video {job.id} is {job.status}" + (f": {job.error.message}" if job.error else "")
    return ApiError(409, "no_content" if job.is_final else "not_ready", message)
