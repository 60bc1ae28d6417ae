"""``/v1/videos/estimate``: what a submission would become."""

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from server.intake import read_submission
from server.outlook import outlook
from server.schemas import VideoEstimate
from server.services import ServicesParam
from server.submission_body import SUBMISSION_BODY

router = APIRouter(tags=["videos"])


@router.post("/v1/videos/estimate", openapi_extra=SUBMISSION_BODY)
async def estimate_video(request: Request, services: ServicesParam) -> VideoEstimate:
    """The body of a submission, checked and resolved the same way; nothing is queued."""
    submission = await read_submission(request, services)
    return await run_in_threadpool(outlook, services, submission)
