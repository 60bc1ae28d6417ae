"""Where webhooks may go: never into the network that the server itself stands in, unless told to.

Knows: URLs, names and addresses. Does not know: what is sent. A name is looked up once, its addresses are
checked, and the connection goes to a checked address: a name that changes its mind meanwhile gains nothing.
"""

import asyncio
import ipaddress
import re
import socket
from dataclasses import dataclass

import httpx

from configs.settings import Settings, variable_name

MAX_URL_CHARACTERS = 2048
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# Python's own lists leave these out. All but the first carry an IPv4 address that a translator would go to.
_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",
        "::/96",
        "::ffff:0:0/96",
        "::ffff:0:0:0/96",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "2001::/32",
        "2002::/16",
    )
)
_HOST = re.compile(rb"[A-Za-z0-9._-]+|[0-9a-fA-F:.]+")


class DestinationError(ValueError):
    """A URL that webhooks do not go to; the message says why."""


class UnknownHostError(DestinationError):
    """The name has no address now. ``is_temporary``: or its name server did not say."""

    def __init__(self, message: str, *, is_temporary: bool) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary


@dataclass(frozen=True, slots=True)
class DestinationRules:
    """What the settings say. ``hosts`` empty: any host with a public address."""

    hosts: tuple[str, ...]
    is_private_allowed: bool

    @classmethod
    def of(cls, settings: Settings) -> "DestinationRules":
        """Read them from the settings."""
        return cls(tuple(host.lower() for host in settings.webhook_hosts), settings.webhook_allow_private)

    def parse(self, text: str) -> httpx.URL:
        """The URL, if webhooks may go to a host of that name. Raises DestinationError."""
        if len(text) > MAX_URL_CHARACTERS:
            raise DestinationError(f"a webhook URL has at most {MAX_URL_CHARACTERS} characters")
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError) as error:
            raise DestinationError(f"{_short(text)} is no URL: {error}") from error
        schemes = ("https", "http") if self.is_private_allowed else ("https",)
        if url.scheme not in schemes or not url.host:
            raise DestinationError(f"{_short(text)} is no {' or '.join(schemes)} URL with a host")
        if _HOST.fullmatch(url.raw_host) is None or not _is_port(url.port):
            raise DestinationError(f"{_short(text)} is no URL: its host or port cannot be")
        if url.userinfo:
            raise DestinationError("a webhook URL must not hold a user name or password")
        if self.hosts and not any(_is_match(url.host, pattern) for pattern in self.hosts):
            raise DestinationError(
                f"host {_short(url.host)} is not one that webhooks may go to: {', '.join(self.hosts)}"
            )
        return url

    async def addresses(self, url: httpx.URL) -> list[str]:
        """The addresses of its host now, each of which may be connected to. Raises DestinationError."""
        found = await _look_up(url.host)
        if not self.is_private_allowed:
            for address in found:
                _check_public(url.host, address)
        return found


def _is_port(port: int | None) -> bool:
    return port is None or 1 <= port <= 65535


def _is_match(host: str, pattern: str) -> bool:
    name = host.lower().removesuffix(".")
    return name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern


async def _look_up(host: str) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        entries = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        temporary = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
        message = f"host {_short(host)} has no address: {reason}"
        raise UnknownHostError(message, is_temporary=temporary) from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _check_public(host: str, text: str) -> None:
    if is_public(text):
        return
    shown = text if host == text else f"{_short(host)} ({text})"
    raise DestinationError(
        f"{shown} is not a public address; {variable_name('webhook_allow_private')} would allow it"
    )


def is_public(text: str) -> bool:
    """Whether an address is one of the open internet and leads nowhere else."""
    if "%" in text:
        return False  # an address of one link
    address: _Address = ipaddress.ip_address(text)
    if any(address in network for network in _NOT_PUBLIC):
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.is_site_local:
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
