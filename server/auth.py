"""Who may come in: API keys, and pages of other origins that a browser was led to.

Knows: hashes of keys and the open paths. Does not know: what the routes do. Deny by default: a path that
is not listed as open needs a key, whether or not it exists.
"""

import hashlib
import hmac
import ipaddress
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from configs.settings import Settings
from server.errors import ApiError

HEALTH_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
ROOT_PATHS = frozenset({"/", "/docs", "/openapi.json"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def _owner_of(request: Request) -> str | None:
    owner: str | None = request.state.owner  # an error on an open path, where nobody knows who asks
    return owner


OwnerParam = Annotated[str | None, Depends(_owner_of)]
"""SHA-256 (hex) of the request's API key; None: this server asks for none. Jobs belong to it."""


class AuthMiddleware:
    """Answers 401 and 403 itself; everything else goes on, with its owner in the request's state."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._host = settings.host
        self._is_any_host_welcome = settings.allow_unauthenticated
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
            self._note_owner(scope)
            await self._app(scope, receive, send)
        else:
            await refusal.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if not self._digests:
            return self._foreign_host(headers) or _cross_origin(scope["method"], headers)
        if scope["path"] in self._open_paths or self._is_known(headers):
            return None
        return ApiError(
            401,
            "invalid_api_key",
            "a valid API key is needed: Authorization: Bearer KEY",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _foreign_host(self, headers: Headers) -> ApiError | None:
        # A page can have its own name resolve to this machine; then browsers take the server for its origin.
        host = headers.get("host")
        if self._is_any_host_welcome or host is None or _is_own_name(host, self._host):
            return None
        message = (
            f"Host {host[:200]!r} is no name of a server without API keys: use localhost or an address, "
            "set API keys, or start with --allow-unauthenticated"
        )
        return ApiError(403, "cross_origin", message)

    def _is_known(self, headers: Headers) -> bool:
        digest = _digest_of_key(headers).encode()
        # Every digest is compared, so the time does not tell which one was near.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)

    def _note_owner(self, scope: Scope) -> None:
        if not self._digests:
            scope.setdefault("state", {})["owner"] = None
        elif scope["path"] not in self._open_paths:
            scope.setdefault("state", {})["owner"] = _digest_of_key(Headers(scope=scope))


def _digest_of_key(headers: Headers) -> str:
    """SHA-256 (hex) of the bearer key; empty: there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return hashlib.sha256(key.strip().encode("latin-1")).hexdigest() if scheme.lower() == "bearer" else ""


def _cross_origin(method: str, headers: Headers) -> ApiError | None:
    """Without keys, any web page could post to a server on its reader's own machine."""
    origin = headers.get("origin")
    if method in SAFE_METHODS or origin is None or origin.partition("://")[2] == headers.get("host"):
        return None
    return ApiError(403, "cross_origin", f"requests from pages of {origin[:200]!r} are refused")


def _is_own_name(host: str, listening_on: str) -> bool:
    """Whether no stranger can give this name (with or without a port) to their page: nobody else owns it."""
    name = host.rpartition("]")[0].removeprefix("[") or host.partition(":")[0]
    if name.lower() in {"localhost", listening_on.lower()}:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
