"""Pictures that clients send: whether they are what they say, and small enough to decode.

Knows: formats, sizes, and that a small file can hold a picture that fills the memory. Does not know: HTTP, or
what a picture is for.
"""

import binascii
import io
import re
from base64 import b64decode
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

FORMATS = ("JPEG", "PNG", "WEBP")
MAX_SIDE = 16_384
_DATA_URL = re.compile(r"data:image/[a-z+.-]{1,20};base64,(?P<text>[A-Za-z0-9+/=\s]*)", re.IGNORECASE)


class PictureError(ValueError):
    """No picture that can be used; the message says why."""


@dataclass(frozen=True, slots=True)
class PictureInfo:
    """What the picture turned out to be."""

    format: str
    width: int
    height: int


def picture_of_data_url(url: str) -> bytes:
    """The bytes in ``data:image/...;base64,...``. Raises PictureError."""
    match = _DATA_URL.fullmatch(url)
    if match is None:
        raise PictureError("is neither a file of a form nor a data:image/...;base64,... URL")
    try:
        return b64decode(match["text"], validate=False)
    except binascii.Error as error:
        raise PictureError(f"is not valid base64: {error}") from error


def check_picture(data: bytes, max_pixels: int) -> PictureInfo:
    """Decode it whole, after a look at the size that its header states. Raises PictureError."""
    if not data:
        raise PictureError("is empty")
    info = _header(data)
    if info.width * info.height > max_pixels or max(info.width, info.height) > MAX_SIDE:
        raise PictureError(
            f"has {info.width}x{info.height} pixels; the limits are {max_pixels} in all and {MAX_SIDE} a side"
        )
    _decode(data)
    return info


def _header(data: bytes) -> PictureInfo:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            return PictureInfo(str(picture.format), picture.width, picture.height)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureError(f"has too many pixels: {error}") from error
    except UnidentifiedImageError as error:
        raise PictureError(f"is not a picture in one of the formats {', '.join(FORMATS)}") from error
    except Exception as error:  # broken files make the decoders raise errors of many kinds
        raise PictureError(f"cannot be read: {error}") from error


def _decode(data: bytes) -> None:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            picture.verify()
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            picture.load()
    except Exception as error:  # as above
        raise PictureError(f"is broken: {error}") from error
