"""Who may come in: API keys, and pages of other origins that a browser was led to.

Knows: hashes of keys and the open paths. Does not know: what the routes do. Deny by default: a path that
is not listed as open needs a key, whether or not it exists.
"""

import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from configs.settings import Settings
from server.errors import ApiError

HEALTH_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
ROOT_PATHS = frozenset({"/", "/docs", "/openapi.json"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class AuthMiddleware:
    """Answers 401 and 403 itself; everything else goes on."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._digests = [digest.encode() for digest in settings.api_keys_sha256]
        self._open_paths = (
            HEALTH_PATHS
            | (frozenset({"/metrics"}) if settings.open_metrics else frozenset())
            | (ROOT_PATHS if settings.open_root else frozenset())
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if not self._digests:
            return None if scope["method"] in SAFE_METHODS else _cross_origin(headers)
        if scope["path"] in self._open_paths or self._is_known(headers.get("authorization", "")):
            return None
        return ApiError(
            401,
            "invalid_api_key",
            "a valid API key is needed: Authorization: Bearer KEY",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _is_known(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).hexdigest().encode()
        # Every digest is compared, so the time does not tell which one was near.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches) and scheme.lower() == "bearer"


def _cross_origin(headers: Headers) -> ApiError | None:
    """Without keys, any web page could post to a server on its reader's own machine."""
    origin = headers.get("origin")
    if origin is None or urlsplit(origin).netloc == headers.get("host"):
        return None
    return ApiError(403, "cross_origin", f"requests from pages of {origin[:200]!r} are refused")
