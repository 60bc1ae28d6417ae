"""A real HTTP balancer in front of API processes: every request goes to the next one, whoever sent the last.

Knows: requests and streamed answers. Does not know: what is behind it.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

PIECE_BYTES = 65536
HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "server", "date"})


class Balancer:
    """Listens on ``port`` within a ``with`` block. ``taken`` counts the requests that each port got."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.taken: Counter[int] = Counter()
        self._ports = itertools.cycle(ports)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        """One request and its answer, piece by piece as it comes."""
        port = next(self._ports)
        self.taken[port] += 1
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        with closing(HTTPConnection("127.0.0.1", port)) as target:
            target.request(handler.command, handler.path, body, dict(handler.headers.items()))
            with target.getresponse() as answer:
                self._answer(handler, answer)

    def _answer(self, handler: BaseHTTPRequestHandler, answer: HTTPResponse) -> None:
        handler.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                handler.send_header(name, value)
        handler.send_header("Connection", "close")
        handler.close_connection = True
        handler.end_headers()
        while piece := answer.read1(PIECE_BYTES):
            handler.wfile.write(piece)
            handler.wfile.flush()


def _handler_of(balancer: Balancer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

        def _pass_on(self) -> None:
            try:
                balancer.pass_on(self)
            except OSError:  # the client has gone
                self.close_connection = True

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815

    return Handler
