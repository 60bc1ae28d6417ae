"""``/v1/videos/{id}/events``: the life of a job as server-sent events."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import anyio
from fastapi import APIRouter, Header
from fastapi.responses import Response
from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent

from server.errors import ApiError
from server.job import Job
from server.present import progress_of
from server.schemas import Video, VideoDeleted
from server.services import Services, ServicesParam

router = APIRouter(tags=["videos"])

PING_SECONDS = 15
RECHECK_SECONDS = 5.0


@router.get(
    "/v1/videos/{video_id}/events",
    response_class=EventSourceResponse,
    responses={200: {"content": {"text/event-stream": {}}}, 204: {"description": "All was seen."}},
)
async def watch_video(
    video_id: str, services: ServicesParam, last_event_id: Annotated[str, Header()] = ""
) -> Response:
    """Events: ``snapshot``, then ``status`` and ``progress``, then one of ``completed``, ``failed``,
    ``cancelled``, ``deleted``. Ids are row versions; ``Last-Event-ID`` leaves out what was seen."""
    job = services.jobs.get(video_id)
    if job is None:
        raise ApiError.video_not_found(video_id)
    seen = int(last_event_id) if last_event_id.isdecimal() and len(last_event_id) < 19 else None
    if job.is_final and seen == job.version:
        return Response(status_code=204)  # tells a browser's EventSource not to come back
    return EventSourceResponse(_follow(services, video_id, seen), ping=PING_SECONDS, sep="\n")


async def _follow(services: Services, video_id: str, seen: int | None) -> AsyncIterator[ServerSentEvent]:
    job: Job | None = None
    shown: Video | None = None
    while not services.feed.is_closed:
        change = services.feed.next_change()
        job, before = services.jobs.get(video_id), job
        if job is None:
            yield _event("deleted", VideoDeleted(id=video_id), before.version + 1 if before else 0)
            return
        video = services.presenter.video(job)
        name = _name_of_change(shown, video) if shown else ("snapshot" if job.version != seen else None)
        if name is not None:
            yield _event(name, progress_of(video) if name == "progress" else video, job.version)
        if job.is_final:
            yield _event(job.status, video, job.version)
            return
        shown = video
        await _wait(change)


def _name_of_change(shown: Video, video: Video) -> str | None:
    if video.status != shown.status:
        return None if video.completed_at else "status"
    if video.queue_position != shown.queue_position or video.cancel_requested != shown.cancel_requested:
        return "status"
    is_same = progress_of(video).model_copy(update={"eta_seconds": None}) == progress_of(shown).model_copy(
        update={"eta_seconds": None}
    )
    return None if is_same else "progress"


def _event(name: str, data: BaseModel, version: int) -> ServerSentEvent:
    return ServerSentEvent(data=data.model_dump_json(), event=name, id=str(version))


async def _wait(change: asyncio.Event) -> None:
    with anyio.move_on_after(RECHECK_SECONDS):
        await change.wait()
