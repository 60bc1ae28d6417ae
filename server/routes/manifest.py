"""``/v1/videos/{id}/manifest``: everything needed to make a clip again."""

from fastapi import APIRouter

from configs.manifest import Manifest
from server.auth import OwnerParam
from server.errors import ApiError
from server.services import ServicesParam

router = APIRouter(tags=["videos"])


@router.get("/v1/videos/{video_id}/manifest")
def get_manifest(video_id: str, services: ServicesParam, owner: OwnerParam) -> Manifest:
    """What ran, as it ran. Sent back as `manifest` of a submission it makes the same clip."""
    job = services.jobs.get(video_id, owner)
    if job is None:
        raise ApiError.video_not_found(video_id)
    if job.result is None:
        message = f"video {job.id} is {job.status}" + (f": {job.error.message}" if job.error else "")
        raise ApiError(409, "no_content" if job.is_final else "not_ready", message)
    if job.result.environment is None:
        raise ApiError(409, "no_content", f"video {job.id} was made by a version that wrote no manifests")
    return Manifest.of(job.parameters, job.result.attention, job.result.environment, job.result.memory)
