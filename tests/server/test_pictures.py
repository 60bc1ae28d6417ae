"""Pictures from strangers."""

import base64
import resource
import zlib

import pytest

from server.pictures import PictureError, PictureInfo, check_picture, picture_of_data_url
from tests.server.picture_files import bomb, picture, png, text_bomb, wide_webp

MAX_PIXELS = 1_000_000


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_what_it_says(format: str) -> None:
    assert check_picture(picture(format), MAX_PIXELS) == PictureInfo(format, 32, 24)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\0" * 100, "not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
        (picture("GIF"), "not a picture"),
        (picture("BMP"), "not a picture"),
        (picture("TIFF"), "not a picture"),
        (picture("PNG")[:20], "."),
        (picture("PNG")[:-20], "broken"),
        (picture("JPEG")[:-60], "Truncated"),
        (picture("WEBP")[:-10], "."),
        (picture("PNG", 1200, 900), "1200x900"),
        (png(20_000, 1, b""), "20000x1"),
        (png(0, 0, b""), "."),
        (png(8, 8, zlib.compress(b"\0")), "broken"),
        (png(8, 8, b"x"), "broken"),
        (text_bomb(), "."),
        (wide_webp(), "pixels"),
        (png(2**31 - 1, 2**31 - 1, b""), "pixels"),
        (png(10_000, 10_000, b""), "pixels"),
    ],
    ids=range(19),
)
def test_what_cannot_be_used_is_told_why(data: bytes, reason: str) -> None:
    with pytest.raises(PictureError, match=reason):
        check_picture(data, MAX_PIXELS)


def test_a_bomb_is_refused_by_its_header() -> None:
    data = bomb(16_000, 9000)
    assert len(data) < 300_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        with pytest.raises(PictureError, match="pixels"):
            check_picture(data, 40_000_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kilobytes


def test_a_data_url_is_read() -> None:
    text = base64.b64encode(picture("PNG")).decode()
    assert picture_of_data_url(f"data:image/png;base64,{text}") == picture("PNG")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "https://example.com/a.png",
        "file:///etc/passwd",
        "data:text/html;base64,eA==",
        "data:image/png,x",
    ],
)
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(PictureError, match="data:image"):
        picture_of_data_url(url)


def test_bad_base64_is_refused() -> None:
    with pytest.raises(PictureError, match="base64"):
        picture_of_data_url("data:image/png;base64,A")
