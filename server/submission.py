"""From a request to a queued job.

Knows: what must hold before a row is written. Does not know: how the body was sent, or who runs the job.
"""

from configs.job import JobParameters
from configs.ranks import check_ranks_can_share
from configs.resolve import RequestError, resolve
from server.capacity import Capacity, capacity, what_is_missing
from server.errors import ApiError
from server.job import Job, NewJob
from server.jobs import IdempotencyConflictError, QueueFullError, QuotaExceededError, Submission
from server.request_identity import request_sha256
from server.rerun import rerun_parameters
from server.retry_after import retry_after_full_queue, retry_after_quota
from server.schemas import RerunRequest, VideoRequest
from server.services import Services

MAX_KEY_CHARACTERS = 255
# Jobs that a prediction of memory is compared with.
RECENT_JOBS = 20

AnyRequest = VideoRequest | RerunRequest


def submit(
    services: Services, request: AnyRequest, idempotency_key: str | None, owner: str | None
) -> Submission:
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
    sha256 = request_sha256(request)
    if idempotency_key is not None and (known := _submitted(services, owner, idempotency_key, sha256)):
        return Submission(known, is_new=False)
    parameters = resolve_request(services, request)
    _refuse_without_room(services, parameters)
    new = NewJob(
        parameters,
        attention_asked=request.attention if isinstance(request, VideoRequest) else None,
        metadata=request.metadata,
        request_sha256=sha256,
        idempotency_key=idempotency_key,
        owner=owner,
        priority=request.priority,
        deadline_seconds=request.deadline_seconds,
        webhook_url=request.webhook_url,
        warnings=tuple(length_warnings(request, parameters)),
    )
    submission = _write(services, new)
    services.supervisor.wake()
    return submission


def resolve_request(services: Services, request: AnyRequest) -> JobParameters:
    """What will run. Raises ApiError: 400 naming the field."""
    try:
        if isinstance(request, RerunRequest):
            parameters = rerun_parameters(request.manifest, services.preset)
        else:
            _check_model(services, request.model)
            parameters = resolve(request, services.preset, services.attention)
        check_ranks_can_share(parameters, services.settings.gpus)
    except RequestError as error:
        raise ApiError(400, "invalid_value", str(error), param=error.field) from error
    if request.checkpoint_every is None:
        return parameters
    return parameters.model_copy(update={"checkpoint_every": request.checkpoint_every})


def length_warnings(request: AnyRequest, parameters: JobParameters) -> list[str]:
    """Says so when the length asked for is not quite the one that will be made."""
    asked = request.seconds if isinstance(request, VideoRequest) else None
    frames, fps = parameters.num_frames, parameters.fps
    if asked is None or asked == frames / fps:
        return []
    return [f"seconds {asked:g} becomes {frames / fps:g} ({frames} frames), the nearest valid length"]


def capacity_for(services: Services, parameters: JobParameters) -> Capacity | None:
    """What a clip needs of the worker's device; None while that is not known."""
    recent = services.jobs.recent_completed(parameters.model, RECENT_JOBS)
    settings = services.settings
    return capacity(services.preset, settings.memory, settings.compute, services.worker(), recent, parameters)


def _refuse_without_room(services: Services, parameters: JobParameters) -> None:
    found = capacity_for(services, parameters)
    if found is None or found.fits:
        return
    shorter = any(clip.num_frames < parameters.num_frames for clip in found.would_fit)
    field = "num_frames" if shorter else "size"
    raise ApiError(400, "does_not_fit", what_is_missing(found, parameters), param=field)


def _check_model(services: Services, model: str | None) -> None:
    known = services.preset.name
    if model not in {None, known}:
        message = f"model {model!r} is not served here; known: {known}"
        raise ApiError(400, "unknown_model", message, param="model")


def _submitted(services: Services, owner: str | None, key: str, sha256: str) -> Job | None:
    """A repeated request's job: what it could become now, after an update maybe, does not matter."""
    try:
        return services.jobs.submitted(owner, key, sha256)
    except IdempotencyConflictError as error:
        raise _conflict(error) from error


def _conflict(error: IdempotencyConflictError) -> ApiError:
    message = f"this Idempotency-Key was used for another request, which became {error.job_id}"
    return ApiError(422, "idempotency_conflict", message, param="Idempotency-Key")


def _write(services: Services, new: NewJob) -> Submission:
    try:
        return services.jobs.submit(new)
    except IdempotencyConflictError as error:
        raise _conflict(error) from error
    except QueueFullError as error:
        seconds = retry_after_full_queue(services.jobs, new.parameters.model)
        message = f"the queue is full: {error.limit} jobs wait; try again in {seconds} s"
        raise _too_many("queue_full", message, seconds) from error
    except QuotaExceededError as error:
        seconds = retry_after_quota(services.jobs, services.staff(), new.owner or "")
        message = (
            f"{error.limit} jobs of this API key wait or run, and it may have no more; "
            f"try again in {seconds} s"
        )
        raise _too_many("quota_exceeded", message, seconds) from error


def _too_many(code: str, message: str, seconds: int) -> ApiError:
    return ApiError(429, code, message, headers={"Retry-After": str(seconds)})
