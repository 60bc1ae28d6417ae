"""Which methods a path takes, and HEAD for everything that GET answers.

Knows: how routes match. Does not know: what they do. An event stream has no HEAD: it would end with its job.
"""

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
STREAM_SUFFIX = "/events"


class HeadMiddleware:
    """Has GET answer HEAD where no route of its own does; the HTTP server leaves the body out."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD" or not _is_head_by_get(self._routes, scope):
            await self._app(scope, receive, send)
            return
        as_get = {**scope, "method": "GET"}
        try:
            await self._app(as_get, receive, send)
        finally:
            # For the log line and the metrics of the layers outside.
            scope.update({name: as_get[name] for name in ("route", "path_params") if name in as_get})


def allowed_methods(routes: Iterable[BaseRoute], scope: Scope) -> str:
    """The value of ``Allow`` for the path of a request."""
    found = [method for method in METHODS if _matches(routes, scope, method)]
    if "HEAD" not in found and _is_head_by_get(routes, scope):
        found.insert(1, "HEAD")
    return ", ".join(found)


def _is_head_by_get(routes: Iterable[BaseRoute], scope: Scope) -> bool:
    if scope["path"].endswith(STREAM_SUFFIX) or _matches(routes, scope, "HEAD"):
        return False
    return _matches(routes, scope, "GET")


def _matches(routes: Iterable[BaseRoute], scope: Scope, method: str) -> bool:
    as_method = {**scope, "method": method}
    return any(route.matches(as_method)[0] is Match.FULL for route in routes)
