"""A client that sends bytes as they are and judges the answer.

Knows: sockets, HTTP answers and the error envelope. Does not know: what was sent, or why.
"""

import http.client
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tests.robustness.attacks import Attack

TIMEOUT_SECONDS = 60.0
# How long an answer is waited for that need not come.
SHORT_SECONDS = 0.2


@dataclass(frozen=True)
class Verdict:
    """What came back, and what was wrong with it (None: nothing)."""

    status: int | None
    fault: str | None


def send(port: int, attack: Attack) -> Verdict:
    """Send one attack on a connection of its own."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS) as connection:
        is_cut = not _send_pieces(connection, attack)
        connection.settimeout(TIMEOUT_SECONDS if attack.is_whole else SHORT_SECONDS)
        try:
            return _judge(connection, attack.method)
        except (ConnectionResetError, BrokenPipeError):
            # The server may hang up on what it does not want to read to the end; then the answer can be lost.
            return Verdict(None, None)
        except TimeoutError:
            return Verdict(None, f"no answer in {TIMEOUT_SECONDS:g} s" if attack.is_whole else None)
        except http.client.HTTPException as error:
            silent = isinstance(error, http.client.RemoteDisconnected)
            allowed = silent and (is_cut or not attack.is_whole)
            return Verdict(None, None if allowed else f"no HTTP answer: {error!r}")


def _send_pieces(connection: socket.socket, attack: Attack) -> bool:
    try:
        for number, piece in enumerate(attack.pieces):
            if number and attack.pause_seconds:
                time.sleep(attack.pause_seconds)
            connection.sendall(piece)
    except OSError:
        return False
    return True


def _judge(connection: socket.socket, method: str) -> Verdict:
    response = http.client.HTTPResponse(connection, method=method)
    response.begin()
    status = response.status
    if response.headers.get_content_type() == "text/event-stream":
        return Verdict(status, None)
    headers = {name.lower(): value for name, value in response.headers.items()}
    return Verdict(status, envelope_fault(status, headers, response.read(), method))


def envelope_fault(status: int, headers: Mapping[str, str], body: bytes, method: str) -> str | None:
    """What is wrong with an answer, whatever the question was; None: nothing."""
    if "x-request-id" not in headers:
        return "no X-Request-Id"
    if status >= 500 and status != 503:
        return f"status {status}: {body[:200]!r}"
    if status < 400 or method == "HEAD" or _is_envelope(body):
        return None
    return f"status {status} without the envelope: {body[:200]!r}"


def _is_envelope(body: bytes) -> bool:
    try:
        document = json.loads(body)
        error = document["error"]
        texts = [error["message"], error["type"], error["code"]]
    except (ValueError, KeyError, TypeError):
        return False
    named = error["param"] is None or isinstance(error["param"], str)
    return list(document) == ["error"] and named and all(isinstance(text, str) and text for text in texts)
