"""``/v1/videos``: submit, look up, list, cancel, delete."""

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from server.auth import OwnerParam
from server.errors import ApiError
from server.intake import read_submission
from server.job import Job
from server.looking import look
from server.schemas import ListQuery, Video, VideoDeleted, VideoList
from server.services import Services, ServicesParam
from server.submission import submit
from server.submission_body import SUBMISSION_BODY

router = APIRouter(tags=["videos"])

POLL_AFTER_UNKNOWN_MS = 1000
POLL_AFTER_MIN_MS, POLL_AFTER_MAX_MS = 200, 10_000


@router.post(
    "/v1/videos",
    status_code=202,
    openapi_extra=SUBMISSION_BODY,
    responses={200: {"model": Video, "description": "The job that this Idempotency-Key made before."}},
)
async def create_video(
    request: Request,
    response: Response,
    services: ServicesParam,
    owner: OwnerParam,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> Video:
    """Submit a job. It is on disk before the answer is sent.

    The same request with the same Idempotency-Key is answered with the same job, and 200.
    """
    try:
        body = await read_submission(request, services)
        submission = await run_in_threadpool(submit, services, body, idempotency_key, owner)
    except ApiError as error:
        services.http_metrics.reject(error.code)
        raise
    response.status_code = 202 if submission.is_new else 200
    response.headers["Location"] = f"/v1/videos/{submission.job.id}"
    return await look(services.database, _present, services, submission.job, response)


@router.get("/v1/videos")
def list_videos(
    query: Annotated[ListQuery, Query()], services: ServicesParam, owner: OwnerParam
) -> VideoList:
    """One page of jobs, newest first unless asked otherwise."""
    found = services.jobs.page(
        owner, after=query.after, limit=query.limit + 1, order=query.order, status=query.status
    )
    page = services.presenter.videos(found[: query.limit])
    return VideoList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(found) > query.limit,
    )


@router.get("/v1/videos/{video_id}")
async def get_video(video_id: str, response: Response, services: ServicesParam, owner: OwnerParam) -> Video:
    """One job. A failed job is a normal answer."""
    # Asked for most of all.
    return await look(services.database, _find, services, video_id, owner, response)


def _find(services: Services, video_id: str, owner: str | None, response: Response) -> Video:
    job = services.jobs.get(video_id, owner)
    if job is None:
        raise ApiError.video_not_found(video_id)
    return _present(services, job, response)


@router.post("/v1/videos/{video_id}/cancel")
async def cancel_video(
    video_id: str, response: Response, services: ServicesParam, owner: OwnerParam
) -> Video:
    """Cancel a job: a queued one at once, a running one within a step (202 until then).

    A job that has ended stays as it is, so the call may be repeated.
    """
    job = await run_in_threadpool(services.jobs.cancel, video_id, owner)
    if job is None:
        raise ApiError.video_not_found(video_id)
    if job.status == "cancelled":  # no worker has it any more; an earlier attempt may have left a checkpoint
        await services.store.remove(video_id)
    services.supervisor.wake()
    response.status_code = 200 if job.is_final else 202
    return await look(services.database, _present, services, job, response)


@router.delete("/v1/videos/{video_id}")
async def delete_video(video_id: str, services: ServicesParam, owner: OwnerParam) -> VideoDeleted:
    """Delete a job and its file; a running one is stopped."""
    if await run_in_threadpool(services.jobs.delete, video_id, owner) is None:
        raise ApiError.video_not_found(video_id)
    services.supervisor.wake()
    await services.store.remove(video_id)
    return VideoDeleted(id=video_id)


def _present(services: Services, job: Job, response: Response) -> Video:
    video = services.presenter.video(job)
    if not job.is_final:
        response.headers["openai-poll-after-ms"] = str(_poll_after_ms(video.eta_seconds))
    return video


def _poll_after_ms(eta_seconds: float | None) -> int:
    if eta_seconds is None:
        return POLL_AFTER_UNKNOWN_MS
    return min(POLL_AFTER_MAX_MS, max(POLL_AFTER_MIN_MS, int(eta_seconds * 1000 / 10)))
