"""One try to deliver one message.

Knows: HTTP from the client's side. Does not know: which job it is about, or what follows a failure.
"""

import ssl
from dataclasses import dataclass
from typing import Literal

import anyio
import httpx

from server.version import package_version
from server.webhooks.destination import DestinationError, DestinationRules

TIMEOUT_SECONDS = 10.0
GONE = 410


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a try. ``detail`` is for the log; gone: the receiver wants no more of it."""

    kind: Literal["delivered", "failed", "gone"]
    detail: str


class Sender:
    """Posts to addresses that were checked. Redirects are not followed, and no answer's body is read."""

    def __init__(self, rules: DestinationRules, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._rules = rules
        self._timeout_seconds = timeout_seconds
        self._tls: ssl.SSLContext | None = None

    async def send(self, url_text: str, body: bytes, headers: dict[str, str]) -> Outcome:
        """Try once. Never raises for what the receiver or the network does."""
        try:
            with anyio.fail_after(self._timeout_seconds):
                return await self._send(url_text, body, headers)
        except TimeoutError:
            return Outcome("failed", f"no answer within {self._timeout_seconds:g} seconds")
        except (httpx.HTTPError, httpx.InvalidURL, DestinationError, OSError) as error:
            return Outcome("failed", f"{type(error).__name__}: {error}")

    async def _send(self, url_text: str, body: bytes, headers: dict[str, str]) -> Outcome:
        url = self._rules.parse(url_text)
        addresses = await self._rules.addresses(url)
        # No proxies of the environment: they would look the name up again.
        async with httpx.AsyncClient(
            verify=self._context(), trust_env=False, timeout=self._timeout_seconds, follow_redirects=False
        ) as client:
            *others, last = addresses
            for address in others:
                try:
                    return await _post(client, url, address, body, headers)
                except httpx.ConnectError:
                    continue
            return await _post(client, url, last, body, headers)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:  # reading all the certificates takes a while
            self._tls = httpx.create_ssl_context()
        return self._tls


async def _post(
    client: httpx.AsyncClient, url: httpx.URL, address: str, body: bytes, headers: dict[str, str]
) -> Outcome:
    """Connect to ``address``, and speak to it as the host of ``url``."""
    said = {
        **headers,
        "Host": url.netloc.decode("ascii"),
        "Content-Type": "application/json",
        "User-Agent": f"Reelwright/{package_version()}",
        "Connection": "close",
    }
    request = client.stream(
        "POST",
        url.copy_with(host=address),
        content=body,
        headers=said,
        extensions={"sni_hostname": url.raw_host.decode("ascii")},
    )
    async with request as answer:
        status = answer.status_code
    if 200 <= status < 300:
        return Outcome("delivered", f"status {status}")
    return Outcome("gone" if status == GONE else "failed", f"status {status}")
