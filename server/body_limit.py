"""A bound on request bodies, and a higher one where files come in.

Knows: bytes. Does not know: what they say.
"""

from collections.abc import Set

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError


class BodyLimitMiddleware:
    """Answers 413 at a Content-Length that is too large, or when more bytes come than may."""

    def __init__(
        self, app: ASGIApp, max_bytes: int, max_upload_bytes: int = 0, upload_paths: Set[str] = frozenset()
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_upload_bytes = max_upload_bytes
        self._upload_paths = upload_paths

    def _limit(self, scope: Scope, headers: Headers) -> int:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["path"] in self._upload_paths and kind == "multipart/form-data":
            return self._max_bytes + self._max_upload_bytes
        return self._max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        limit = self._limit(scope, headers)
        length = headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > limit):
            await _too_large(limit).response()(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
            return message

        await self._app(scope, counted, send)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body is larger than {limit} bytes")
