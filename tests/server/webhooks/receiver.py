"""A web server that takes webhooks and answers as a test wants.

Knows: what came in, in order. Does not know: who sends it.
"""

import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass(frozen=True)
class Received:
    """One request."""

    at: float
    path: str
    headers: dict[str, str]
    body: bytes


def status(code: int, **headers: str) -> Answer:
    """Answer with a status and no body."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


class Receiver:
    """Listens on 127.0.0.1 within a ``with`` block. Answers are used in turn, the last one for ever."""

    def __init__(self, *answers: Answer, tls: ssl.SSLContext | None = None) -> None:
        self.received: list[Received] = []
        self._answers = list(answers) or [status(204)]
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.received.append(Received(time.time(), self.path, headers, body))
                receiver._next_answer()(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}/hook"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait(self, count: int, seconds: float = 30.0) -> list[Received]:
        """Wait until so many requests have come."""
        give_up_at = time.monotonic() + seconds
        while len(self.received) < count:
            assert time.monotonic() < give_up_at, f"{len(self.received)} of {count} webhooks came"
            time.sleep(0.02)
        return self.received

    def _next_answer(self) -> Answer:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
