"""From an HTTP request to a submission that holds together, be it a new clip or one from a manifest.

Knows: what a body may hold besides plain fields, and what takes time to check. Does not know: what the model
can make, or the queue (server/submission.py).
"""

import anyio
import anyio.to_thread
from starlette.requests import Request

from configs.settings import Settings, variable_name
from server.bodies import BodyRules, RawBody, read_body
from server.errors import ApiError
from server.pictures import PictureError, check_picture, picture_of_data_url
from server.schemas import RerunRequest, VideoRequest
from server.services import Services
from server.webhooks.destination import DestinationError, DestinationRules, UnknownHostError

PICTURE = "input_reference"
MANIFEST = "manifest"
WEBHOOK = "webhook_url"
LOOK_UP_SECONDS = 3.0
# A picture at the limit of pixels takes a core for a while, and four bytes of memory a pixel.
_DECODERS = anyio.CapacityLimiter(2)


async def read_submission(request: Request, services: Services) -> VideoRequest | RerunRequest:
    """The body of a submission. Raises ApiError: 400, 413 or 415, naming the field."""
    raw = await read_body(request, _rules(services.settings))
    submission = _parse(raw)
    if isinstance(submission, VideoRequest):
        await _refuse_picture(services, submission, raw)
    if submission.webhook_url is not None:
        await _check_webhook(services.settings, submission.webhook_url)
    return submission


def _rules(settings: Settings) -> BodyRules:
    return BodyRules(
        max_text_bytes=settings.max_body_bytes,
        max_file_bytes=settings.max_upload_bytes,
        files=frozenset({PICTURE}),
        documents=frozenset({MANIFEST}),
    )


def _parse(raw: RawBody) -> VideoRequest | RerunRequest:
    if MANIFEST not in raw.names:
        return raw.as_model(VideoRequest)
    decided = sorted(raw.names & VideoRequest.model_fields.keys() - RerunRequest.model_fields.keys())
    if decided:
        message = f"{', '.join(decided)} cannot be given with manifest, which decides the clip; leave it out"
        raise ApiError(400, "invalid_value", message, param=decided[0])
    return raw.as_model(RerunRequest)


async def _refuse_picture(services: Services, request: VideoRequest, raw: RawBody) -> None:
    """No served model takes a picture. A file that is none is told so first: that is wrong everywhere."""
    data = raw.files.get(PICTURE)
    if data is None and request.input_reference is None:
        return
    try:
        if data is None:
            data = picture_of_data_url(request.input_reference or "")
        most = services.settings.max_upload_pixels
        await anyio.to_thread.run_sync(check_picture, data, most, limiter=_DECODERS)
    except PictureError as error:
        raise ApiError(400, "invalid_value", f"{PICTURE} {error}", param=PICTURE) from error
    message = f"model {services.preset.name} makes videos from text only: it takes no {PICTURE}"
    raise ApiError(400, "unsupported", message, param=PICTURE)


async def _check_webhook(settings: Settings, url_text: str) -> None:
    if settings.webhook_secret is None:
        message = f"this server sends no webhooks: it has no {variable_name('webhook_secret')} to sign them"
        raise ApiError(400, "unsupported", message, param=WEBHOOK)
    rules = DestinationRules.of(settings)
    try:
        # A name server that is slow or away keeps no job from being taken: each delivery asks it again.
        with anyio.move_on_after(LOOK_UP_SECONDS):
            await rules.addresses(rules.parse(url_text))
    except DestinationError as error:
        if isinstance(error, UnknownHostError) and error.is_temporary:
            return
        raise ApiError(400, "invalid_value", f"{WEBHOOK}: {error}", param=WEBHOOK) from error
