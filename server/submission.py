"""From a request to a queued job.

Knows: what must hold before a row is written. Does not know: how the body was sent, or who runs the job.
"""

import hashlib

from configs.resolve import RequestError, resolve
from server.errors import ApiError
from server.job import NewJob
from server.jobs import IdempotencyConflictError, Submission
from server.schemas import VideoRequest
from server.services import Services

MAX_KEY_CHARACTERS = 255


def submit(services: Services, request: VideoRequest, idempotency_key: str | None) -> Submission:
    """Resolve the request to what will run and write the row. Raises ApiError."""
    if idempotency_key is not None and not 1 <= len(idempotency_key) <= MAX_KEY_CHARACTERS:
        message = f"Idempotency-Key must have 1 to {MAX_KEY_CHARACTERS} characters"
        raise ApiError(400, "invalid_value", message, param="Idempotency-Key")
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
    digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
    new = NewJob(parameters, request.attention, request.metadata, digest, idempotency_key)
    try:
        submission = services.jobs.submit(new)
    except IdempotencyConflictError as error:
        message = f"this Idempotency-Key was used for another request, which became {error.job_id}"
        raise ApiError(422, "idempotency_conflict", message, param="Idempotency-Key") from error
    services.supervisor.wake()
    return submission
