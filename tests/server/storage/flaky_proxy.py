"""A real HTTP proxy in front of an object store, which fails every third request or holds some of them."""

import itertools
import threading
import time
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

SLOW_SECONDS = 0.3


class FlakyProxy:
    """Listens on ``port`` within a ``with`` block.

    While ``is_flaky``, of every nine requests the third is answered with 500, the sixth has its answer cut in
    the middle (it has had its effect), and the ninth is slow. ``hold`` stops requests by a word in them.
    """

    def __init__(self, target_port: int, *, is_flaky: bool = False) -> None:
        self.is_flaky = is_flaky
        self.is_down = False
        self.failed = 0
        self.lines: list[str] = []
        self._target_port = target_port
        self._count = itertools.count(1)
        self._held_word: str | None = None
        self._is_open = threading.Event()
        self._is_open.set()
        self.is_holding = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()

    def hold(self, word: str) -> None:
        """From now on no request with that word in its line gets further."""
        self.is_holding.clear()
        self._is_open.clear()
        self._held_word = word

    def release(self) -> None:
        """Let them go on."""
        self._held_word = None
        self._is_open.set()

    def pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        """One request."""
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        self.lines.append(handler.requestline)
        if self._held_word is not None and self._held_word in handler.requestline:
            self.is_holding.set()
            self._is_open.wait()
        turn = next(self._count) % 9 if self.is_flaky else 0
        self.failed += turn in {3, 6}
        if turn == 3 or self.is_down:
            handler.send_error(500)
            return
        target = HTTPConnection("127.0.0.1", self._target_port)
        target.request(handler.command, handler.path, body, dict(handler.headers.items()))
        answer = target.getresponse()
        data = answer.read()
        target.close()
        if turn == 0 and self.is_flaky:
            time.sleep(SLOW_SECONDS)
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {"transfer-encoding", "content-length", "connection", "server", "date"}:
                handler.send_header(name, value)
        length = answer.getheader("content-length") if handler.command == "HEAD" else str(len(data))
        handler.send_header("Content-Length", length or "0")
        handler.end_headers()
        handler.wfile.write(data[: len(data) // 2] if turn == 6 else data)
        handler.close_connection = turn == 6


def _handler_of(proxy: FlakyProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

        def _pass_on(self) -> None:
            try:
                proxy.pass_on(self)
            except OSError:  # the client has gone
                self.close_connection = True

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815

    return Handler
