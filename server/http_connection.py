"""One client's connection, before there is a request: limits on its head, and answers to what is no HTTP.

Knows: bytes and time. Does not know: routes. A client that sends no request gets the same envelope as all.
"""

import asyncio
import uuid
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server import logs
from server.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
# Between two pieces of a request; the time that the server itself takes does not count.
SILENCE_SECONDS = 60.0


class HttpConnection(HttpToolsProtocol):
    """uvicorn's, with bounded memory and time for each request that is not complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._is_in_head = False
        self._is_incomplete = False
        self._silence: asyncio.TimerHandle | None = None
        self._unanswered: list[RequestResponseCycle] = []

    def data_received(self, data: bytes) -> None:
        """Bytes came in; at most one piece more than the limit is ever held."""
        self._stop_waiting()
        if not self._is_incomplete:
            self._is_in_head, self._head_bytes = True, 0
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "head_too_large", f"request line and headers may have {MAX_HEAD_BYTES} bytes")
        if self._is_incomplete and not self.transport.is_closing():
            self._silence = self.loop.call_later(SILENCE_SECONDS, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._stop_waiting()
        self._abandon_answers()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._is_incomplete = self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._is_in_head = False
        super().on_headers_complete()
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        if self.cycle is not None:
            self._unanswered.append(self.cycle)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._is_incomplete = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self._refuse(400, "bad_request", "this is not a valid HTTP request")

    def _give_up(self) -> None:
        self._refuse(408, "request_timeout", f"the request did not go on for {SILENCE_SECONDS:g} seconds")

    def _abandon_answers(self) -> None:
        # uvicorn tells only the last request of a connection, and starts the ones that wait behind it.
        self.pipeline.clear()
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._unanswered.clear()

    def _stop_waiting(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _refuse(self, status: int, code: str, message: str) -> None:
        if self.transport.is_closing():
            return
        request_id = uuid.uuid4().hex
        logs.get_logger().info("connection_refused", request=request_id, status=status, code=code)
        # Where another answer is on its way, a second one would be taken for a part of it.
        if not any(cycle.response_started and not cycle.response_complete for cycle in self._unanswered):
            self.transport.write(_answer(ApiError(status, code, message), request_id))
        self._abandon_answers()
        self.transport.close()


def _answer(error: ApiError, request_id: str) -> bytes:
    response = error.response()
    response.headers["X-Request-Id"] = request_id
    response.headers["Connection"] = "close"
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(response.body)])
