"""Connections that carry no request: refused in the envelope, with bounded memory and time."""

import asyncio
import json
import re
import socket

import pytest

from server import http_connection
from server.http_connection import MAX_HEAD_BYTES, HttpConnection
from tests.server.running_server import RunningServer


def answer_to(server: RunningServer, *pieces: bytes) -> tuple[int, dict[str, str], str]:
    """Status, headers and error code of what the server says to these bytes, to the end of the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        for piece in pieces:
            try:
                connection.sendall(piece)
            except OSError:
                break
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, str(json.loads(body)["error"]["code"])


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nBroken header\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/videos HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/videos HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/videos HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/videos HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_400_in_the_envelope(server: RunningServer, sent: bytes) -> None:
    status, headers, code = answer_to(server, sent)
    assert (status, code) == (400, "bad_request")
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert headers["x-request-id"] in server.log.read_text()


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET / HTTP/1.1\r\nHost: x\r\nX: ", *[b"a" * 65536] * 32],
        [b"GET / HTTP/1.1\r\nHost: x\r\n", *[b"X: a\r\n" * 8192] * 32],
        [b"GET /", *[b"a" * 65536] * 32],
    ],
)
def test_a_head_without_end_is_cut_off(server: RunningServer, pieces: list[bytes]) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        assert not all(is_sent(connection, piece) for piece in pieces * 1000)


def is_sent(connection: socket.socket, piece: bytes) -> bool:
    """Whether the server has not hung up yet."""
    try:
        connection.sendall(piece)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def test_the_largest_head_is_answered_and_a_larger_one_is_431(server: RunningServer) -> None:
    start, end = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", b"\r\nConnection: close\r\n\r\n"
    fits = start + b"a" * (MAX_HEAD_BYTES - len(start) - len(end)) + end
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(fits)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    status, headers, code = answer_to(server, start + b"a" * (MAX_HEAD_BYTES - len(start) + 1))
    assert (status, code, len(headers["x-request-id"])) == (431, "head_too_large", 32)


def test_a_body_is_no_part_of_the_head(server: RunningServer) -> None:
    body = json.dumps({"prompt": "a red circle", "metadata": {}, "num_inference_steps": 0}).encode()
    body += b" " * (2 * MAX_HEAD_BYTES)
    answer = server.client.post("/v1/videos", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "num_inference_steps")


def test_garbage_after_a_request_does_not_spoil_its_answer(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        first = connection.recv(4096)
        connection.sendall(b"\x00\x01\r\n\r\n")
        answers = first + b"".join(iter(lambda: connection.recv(4096), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"400"]


START = b"POST /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


@pytest.mark.parametrize("sent", [START[:20], START + b"Content-Length: 5\r\n\r\n{"])
def test_a_request_that_does_not_go_on_is_408(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http_connection, "SILENCE_SECONDS", 0.1)
    assert asyncio.run(_answer_of_a_small_server(sent)).startswith(b"HTTP/1.1 408")


def test_time_that_the_server_takes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "SILENCE_SECONDS", 0.05)
    answer = asyncio.run(
        _answer_of_a_small_server(b"GET /slow HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    )
    assert answer.startswith(b"HTTP/1.1 200")


async def _answer_of_a_small_server(sent: bytes) -> bytes:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse
    from starlette.types import Receive, Scope, Send

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await asyncio.sleep(0.3)
        else:
            await Request(scope, receive).body()
        await PlainTextResponse("ok")(scope, receive, send)

    config = uvicorn.Config(app, http=HttpConnection, lifespan="off", log_config=None)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.startup(sockets=[listener])
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await server.shutdown(sockets=[listener])
    return answer
