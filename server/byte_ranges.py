"""Range requests, as RFC 9110 has them.

Knows: the headers. Does not know: files. One range is served; several are answered with the whole file,
which the RFC allows and every client must take.
"""

import re
from dataclasses import dataclass

from starlette.datastructures import Headers

_ONE_RANGE = re.compile(r"bytes\s*=\s*(\d{1,18})?\s*-\s*(\d{1,18})?", re.IGNORECASE)


class RangeNotSatisfiableError(ValueError):
    """The range lies outside the file."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``start`` to ``stop`` (exclusive)."""

    start: int
    stop: int


def requested_range(headers: Headers, size: int, etag: str, last_modified: str) -> ByteRange | None:
    """The part of the file to send, or None for all of it. Raises RangeNotSatisfiableError."""
    if_range = headers.get("if-range")
    if if_range is not None and if_range not in {etag, last_modified}:
        return None
    return parse_range(headers.get("range", ""), size)


def parse_range(header: str, size: int) -> ByteRange | None:
    """One range; None if the header is absent, malformed or has several. Raises RangeNotSatisfiableError."""
    match = _ONE_RANGE.fullmatch(header.strip())
    if match is None or match.group(1, 2) == (None, None):
        return None
    first, last = match.groups()
    if first is None:
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), min(size, int(last) + 1) if last is not None else size
        if last is not None and int(last) < start:
            return None
    if start >= size:
        raise RangeNotSatisfiableError(f"the file has {size} bytes; {header[:80]!r} lies outside")
    return ByteRange(start, stop)


def matches_etag(if_none_match: str | None, etag: str) -> bool:
    """Whether the client has this version of the file."""
    if if_none_match is None:
        return False
    candidates = {candidate.strip().removeprefix("W/") for candidate in if_none_match.split(",")}
    return "*" in candidates or etag in candidates
