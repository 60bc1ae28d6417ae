"""From a request to a queued job.

Knows: what must hold before a row is written. Does not know: how the body was sent, or who runs the job.
"""

from configs.resolve import RequestError, resolve
from server.errors import ApiError
from server.job import Job, NewJob
from server.schemas import VideoRequest
from server.services import Services


def submit(services: Services, request: VideoRequest) -> Job:
    """Resolve the request to what will run and write the row. Raises ApiError."""
    if services.supervisor.is_stopping:
        raise ApiError(
            503,
            "draining",
            "the server is stopping; send the request again later",
            headers={"Retry-After": "30"},
        )
    known = services.preset.name
    if request.model not in {None, known}:
        raise ApiError(
            400, "unknown_model", f"model {request.model!r} is not served here; known: {known}", param="model"
        )
    try:
        parameters = resolve(request, services.preset, services.attention)
    except RequestError as error:
        raise ApiError(400, "invalid_value", str(error), param=error.field) from error
    job = services.jobs.submit(NewJob(parameters, request.attention, request.metadata))
    services.supervisor.wake()
    return job
