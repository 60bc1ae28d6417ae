"""One try, against real receivers."""

import asyncio
import contextlib
import ssl
import subprocess
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest

from server.webhooks.destination import DestinationRules
from server.webhooks.sending import Outcome, Sender
from tests.server.running_server import free_port
from tests.server.webhooks.receiver import Receiver, status

OPEN = DestinationRules(hosts=(), is_private_allowed=True)


class AlwaysHere(DestinationRules):
    """Finds every name at 127.0.0.1, as a look-up that was checked."""

    async def addresses(self, url: httpx.URL) -> list[str]:
        return ["127.0.0.1"]


def send(url: str, rules: DestinationRules = OPEN, timeout_seconds: float = 10.0) -> Outcome:
    """Send one message."""
    return asyncio.run(Sender(rules, timeout_seconds).send(url, b'{"a":1}', {"webhook-id": "msg_1"}))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (200, "delivered"),
        (204, "delivered"),
        (410, "gone"),
        (400, "failed"),
        (429, "failed"),
        (503, "failed"),
    ],
)
def test_the_status_decides(code: int, kind: str) -> None:
    with Receiver(status(code)) as receiver:
        outcome = send(receiver.url)
    assert outcome.kind == kind
    assert str(code) in outcome.detail
    (got,) = receiver.received
    assert (got.path, got.body) == ("/hook", b'{"a":1}')
    assert got.headers["content-type"] == "application/json"
    assert got.headers["webhook-id"] == "msg_1"
    assert got.headers["host"] == f"127.0.0.1:{receiver.port}"


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(code: int) -> None:
    with Receiver() as inner, Receiver(status(code, Location=inner.url)) as outer:
        assert send(outer.url).kind == "failed"
    assert inner.received == []


def test_it_connects_to_the_address_that_was_checked() -> None:
    rules = AlwaysHere(hosts=(), is_private_allowed=True)
    with Receiver() as receiver:
        # The name has no address: only the checked one can have been used.
        assert send(f"http://hooks.invalid:{receiver.port}/x?y=1", rules).kind == "delivered"
    (got,) = receiver.received
    assert got.headers["host"] == f"hooks.invalid:{receiver.port}"
    assert got.path == "/x?y=1"


def test_a_private_address_is_refused_at_the_time_of_sending() -> None:
    rules = DestinationRules(hosts=(), is_private_allowed=False)
    with Receiver() as receiver:
        outcome = send(f"https://localhost:{receiver.port}/", rules)
        assert (outcome.kind, receiver.received) == ("failed", [])
    assert "not a public address" in outcome.detail


def test_every_address_of_a_name_is_tried() -> None:
    with Receiver() as receiver:  # where localhost is ::1 too, nobody listens there
        assert send(f"http://localhost:{receiver.port}/").kind == "delivered"


def test_nobody_listens() -> None:
    assert send(f"http://127.0.0.1:{free_port()}/").kind == "failed"


def test_an_answer_that_never_ends_is_not_read() -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            while True:
                handler.wfile.write(b"x" * 65536)

    with Receiver(endless) as receiver:
        assert send(receiver.url, timeout_seconds=5.0).kind == "delivered"


def test_an_answer_that_drips_is_given_up() -> None:
    def dripping(handler: BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):
            for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100:
                handler.wfile.write(bytes([byte]))
                time.sleep(0.05)

    with Receiver(dripping) as receiver:
        began = time.monotonic()
        outcome = send(receiver.url, timeout_seconds=0.5)
    assert (outcome.kind, outcome.detail) == ("failed", "no answer within 0.5 seconds")
    assert time.monotonic() - began < 3.0


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A certificate of hooks.invalid that this process trusts."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-days", "2", "-subj", "/CN=hooks.invalid", "-addext", "subjectAltName=DNS:hooks.invalid"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


def test_tls_is_checked_against_the_name_though_an_address_is_dialled(certificate: ssl.SSLContext) -> None:
    rules = AlwaysHere(hosts=(), is_private_allowed=False)
    with Receiver(tls=certificate) as receiver:
        assert send(f"https://hooks.invalid:{receiver.port}/", rules).kind == "delivered"
        outcome = send(f"https://other.invalid:{receiver.port}/", rules)
    assert outcome.kind == "failed"
    assert "certificate" in outcome.detail.lower()
    assert len(receiver.received) == 1
