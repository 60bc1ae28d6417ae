"""Range headers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from server.byte_ranges import (
    ByteRange,
    RangeNotSatisfiableError,
    matches_etag,
    parse_range,
    requested_range,
)

SIZE = 100
ETAG, DATE = '"abc"', "Mon, 01 Jan 2024 00:00:00 GMT"


@pytest.mark.parametrize(
    ("header", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=10-", 10, 100),
        ("bytes=90-1000", 90, 100),
        ("bytes=-10", 90, 100),
        ("bytes=-1000", 0, 100),
        ("Bytes = 5 - 6", 5, 7),
    ],
)
def test_one_range(header: str, start: int, stop: int) -> None:
    assert parse_range(header, SIZE) == ByteRange(start, stop)


@pytest.mark.parametrize(
    "header", ["", "bytes", "bytes=", "bytes=-", "bytes=a-b", "bytes=9-5", "items=0-5", "bytes=0-1,5-6"]
)
def test_the_whole_file_for_what_is_not_one_range(header: str) -> None:
    assert parse_range(header, SIZE) is None


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_a_range_outside_the_file(header: str) -> None:
    with pytest.raises(RangeNotSatisfiableError, match="100 bytes"):
        parse_range(header, SIZE)


@given(st.text(max_size=20), st.integers(1, 1000))
def test_any_header_gives_a_part_of_the_file(text: str, size: int) -> None:
    try:
        part = parse_range(f"bytes={text}", size)
    except RangeNotSatisfiableError:
        return
    assert part is None or 0 <= part.start < part.stop <= size


@pytest.mark.parametrize(
    ("if_range", "expected"),
    [(ETAG, ByteRange(1, 3)), (DATE, ByteRange(1, 3)), ('"old"', None), (f"W/{ETAG}", None)],
)
def test_if_range_must_match_strongly(if_range: str, expected: ByteRange | None) -> None:
    headers = Headers({"range": "bytes=1-2", "if-range": if_range})
    assert requested_range(headers, SIZE, ETAG, DATE) == expected


@pytest.mark.parametrize(
    ("if_none_match", "expected"),
    [(None, False), (ETAG, True), (f"W/{ETAG}", True), (f'"x", {ETAG}', True), ("*", True), ('"x"', False)],
)
def test_if_none_match(if_none_match: str | None, expected: bool) -> None:
    assert matches_etag(if_none_match, ETAG) is expected
