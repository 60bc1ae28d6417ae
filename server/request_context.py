"""Around every request: its id, its log line, its duration, and the answer when something breaks.

Knows: requests from outside. Does not know: what they ask for.
"""

import asyncio
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import logs
from server.errors import ApiError
from server.http_metrics import HttpMetrics

# Asked for every few seconds by machines.
QUIET_ROUTES = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestContextMiddleware:
    """The outermost layer. A client's own X-Request-Id is kept if it is harmless."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._log = logs.get_logger()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        with logs.request_lines(request_id):
            await self._answer(scope, receive, send, request_id)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        began = time.perf_counter()
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            self._log.debug("client_gone")
        except asyncio.CancelledError:  # the server ends, and this answer is late; the task ends here
            self._log.warning("answer_cut")
            if status is None:
                stopped = ApiError(503, "draining", "the server has stopped")
                await stopped.response()(scope, receive, send_with_id)
        except Exception:
            self._log.exception("request_error")
            if status is not None:
                raise  # the answer has begun: only closing the connection can tell the client
            broken = ApiError(500, "internal", f"something broke on the server; request {request_id}")
            await broken.response()(scope, receive, send_with_id)
        finally:
            self._finish(scope, status or 499, time.perf_counter() - began)

    def _finish(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.observe(route, scope["method"], status, seconds)
        path_params = scope.get("path_params", {})
        write = self._log.debug if route in QUIET_ROUTES else self._log.info
        write(
            "request",
            method=scope["method"],
            route=route,
            status=status,
            seconds=round(seconds, 4),
            **({"job": path_params["video_id"][:64]} if "video_id" in path_params else {}),
        )
