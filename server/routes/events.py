"""``/v1/videos/{id}/events``: the life of a job as server-sent events."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

import anyio
from fastapi import APIRouter, Header
from fastapi.responses import Response
from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent

from server.auth import OwnerParam
from server.database import DatabaseUnavailableError
from server.errors import ApiError
from server.looking import look
from server.present import progress_of
from server.preview_picture import data_url, read_preview
from server.schemas import VideoDeleted, VideoPreview
from server.services import Services, ServicesParam
from server.snapshots import Snapshot

router = APIRouter(tags=["videos"])

PING_SECONDS = 15
RECHECK_SECONDS = 5.0


@router.get(
    "/v1/videos/{video_id}/events",
    response_class=EventSourceResponse,
    responses={200: {"content": {"text/event-stream": {}}}, 204: {"description": "All was seen."}},
)
async def watch_video(
    video_id: str, services: ServicesParam, owner: OwnerParam, last_event_id: Annotated[str, Header()] = ""
) -> Response:
    """Events: ``snapshot``, then ``status``, ``progress`` and ``preview``, then one of ``completed``,
    ``failed``, ``cancelled``, ``deleted``. Ids are row versions; ``Last-Event-ID`` leaves out what was seen.
    """
    job = await look(services.database, services.jobs.get, video_id, owner)
    if job is None:
        raise ApiError.video_not_found(video_id)
    seen = int(last_event_id) if last_event_id.isdecimal() and len(last_event_id) < 19 else None
    if job.is_final and seen == job.version:
        return Response(status_code=204)  # tells a browser's EventSource not to come back
    return EventSourceResponse(_follow(services, video_id, seen), ping=PING_SECONDS, sep="\n")


async def _follow(services: Services, video_id: str, seen: int | None) -> AsyncIterator[ServerSentEvent]:
    shown: Snapshot | None = None
    while not services.feed.is_closed:
        change = services.feed.next_change()
        try:
            now = await services.snapshots.get(video_id)
        except DatabaseUnavailableError:  # the stream goes on when it is back; pings go out meanwhile
            await _wait(change)
            continue
        if now is None:
            yield _event("deleted", VideoDeleted(id=video_id), shown.job.version + 1 if shown else 0)
            return
        name = _name_of_change(shown, now) if shown else ("snapshot" if now.job.version != seen else None)
        if name is not None:
            data = progress_of(now.video) if name == "progress" else now.video
            yield _event(name, data, now.job.version)
        if now.job.is_final:
            yield _event(now.job.status, now.video, now.job.version)
            return
        preview = await _new_preview(services, shown, now) if name is not None else None
        if preview is not None:
            yield _event("preview", preview, now.job.version)
        shown = now
        await _wait(change)


async def _new_preview(services: Services, shown: Snapshot | None, now: Snapshot) -> VideoPreview | None:
    step = now.job.preview_step
    if shown is not None and (shown.job.attempt, shown.job.preview_step) == (now.job.attempt, step):
        return None
    jpeg = await read_preview(services.store, now.job)
    return None if jpeg is None else VideoPreview(id=now.job.id, step=step, data_url=data_url(jpeg))


def _name_of_change(shown: Snapshot, now: Snapshot) -> str | None:
    if now.job.is_final:
        return None  # the last event says it
    for field in ("status", "queue_position", "waiting_reason", "cancel_requested"):
        if getattr(now.video, field) != getattr(shown.video, field):
            return "status"
    return None if now.job.version == shown.job.version else "progress"


def _event(name: str, data: BaseModel, version: int) -> ServerSentEvent:
    return ServerSentEvent(data=data.model_dump_json(), event=name, id=str(version), sep="\n")


async def _wait(change: asyncio.Event) -> None:
    with anyio.move_on_after(RECHECK_SECONDS):
        await change.wait()
