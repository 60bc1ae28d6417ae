"""Where webhooks may go."""

import asyncio

import pytest

from configs.settings import Settings
from server.webhooks.destination import DestinationError, DestinationRules, UnknownHostError, is_public

PUBLIC = DestinationRules(hosts=(), is_private_allowed=False)
LISTED = DestinationRules(hosts=("hooks.example.com", "*.example.org"), is_private_allowed=False)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "127.0.0.1",
        "127.8.8.8",
        "169.254.169.254",
        "172.16.0.1",
        "192.0.0.8",
        "192.168.1.1",
        "198.18.0.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:8.8.8.8",
        "::ffff:0:127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::808:808",
        "64:ff9b:1::1",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "fc00::1",
        "fd00::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "ff0e::1",
    ],
)
def test_an_address_that_is_not_of_the_open_internet(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "2a00:1450:4001:80b::200e"])
def test_a_public_address(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://example.com/x", "https"),
        ("ftp://example.com/x", "https"),
        ("file:///etc/passwd", "https"),
        ("example.com/x", "https"),
        ("https:///x", "host"),
        ("", "https"),
        ("https://user:secret@example.com/", "user name"),
        ("https://user@example.com/", "user name"),
        ("https://example.com:99999/", "URL"),
        ("https://example.com:0/", "port"),
        ("https://example.com:x/", "URL"),
        ("https://exa mple.com/", "URL"),
        ("https://example.com/\r\nHost: x", "URL"),
        ("https://[::1/", "URL"),
        ("https://example.com/" + "x" * 2048, "2048"),
    ],
)
def test_a_url_that_is_refused_as_it_stands(url: str, reason: str) -> None:
    with pytest.raises(DestinationError, match=reason) as caught:
        PUBLIC.parse(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost.",
        "127.0.0.1",
        "127.1",
        "0x7f.1",
        "2130706433",
        "017700000001",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "0",
        "169.254.169.254",
        "[64:ff9b::a9fe:a9fe]",
    ],
)
def test_every_spelling_of_a_private_address_is_refused(host: str) -> None:
    with pytest.raises(DestinationError):
        asyncio.run(PUBLIC.addresses(PUBLIC.parse(f"https://{host}/hook")))


def test_a_name_without_an_address_is_said_so() -> None:
    with pytest.raises(UnknownHostError, match=r"no-such-host\.invalid"):
        asyncio.run(PUBLIC.addresses(PUBLIC.parse("https://no-such-host.invalid/")))


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.com/x",
        "https://HOOKS.example.com:8443/",
        "https://a.example.org/",
        "https://a.b.example.org",
    ],
)
def test_a_listed_host(url: str) -> None:
    assert LISTED.parse(url).host


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/",
        "https://example.org/",
        "https://xexample.org/",
        "https://hooks.example.com.evil.net/",
    ],
)
def test_a_host_that_is_not_listed(url: str) -> None:
    with pytest.raises(DestinationError, match=r"hooks\.example\.com"):
        LISTED.parse(url)


def test_a_private_address_is_allowed_when_the_settings_say_so() -> None:
    rules = DestinationRules.of(Settings(webhook_allow_private=True))
    assert "127.0.0.1" in asyncio.run(rules.addresses(rules.parse("http://localhost:5000/")))
