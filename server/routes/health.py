"""Health checks, for orchestrators and balancers."""

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from server.errors import ErrorBody, ErrorDetail
from server.readiness import unready_reason, unserved_jobs
from server.schemas import Health
from server.services import ServicesParam

router = APIRouter(tags=["operation"])


class Unready(Health, ErrorBody):
    """The error of every answer that is not 2xx, and the reason where the health checks have it."""


@router.get("/health/live")
async def get_live() -> Health:
    """The process answers."""
    return Health(status="ok")


@router.get("/health", response_model=Health)
@router.get("/health/ready", response_model=Health, responses={503: {"model": Unready}})
def get_ready(services: ServicesParam) -> Health | JSONResponse:
    """Jobs can be taken and run; else 503 with the reason."""
    reason = unready_reason(services)
    warnings = unserved_jobs(services)
    if reason is None:
        return Health(status="ok", warnings=warnings)
    code = "draining" if services.supervisor.is_stopping else "not_ready"
    error = ErrorDetail(message=reason, type="server_error", code=code)
    return JSONResponse(
        Unready(status="unavailable", reason=reason, warnings=warnings, error=error).model_dump(), 503
    )
