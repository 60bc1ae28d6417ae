"""Health checks, for orchestrators and balancers."""

from fastapi import APIRouter, Response

from server.readiness import unready_reason
from server.schemas import Health
from server.services import ServicesParam

router = APIRouter(tags=["operation"])


@router.get("/health/live")
async def get_live() -> Health:
    """The process answers."""
    return Health(status="ok")


@router.get("/health")
@router.get("/health/ready")
def get_ready(response: Response, services: ServicesParam) -> Health:
    """Jobs can be taken and run; else 503 with the reason."""
    reason = unready_reason(services)
    if reason is None:
        return Health(status="ok")
    response.status_code = 503
    return Health(status="unavailable", reason=reason)
