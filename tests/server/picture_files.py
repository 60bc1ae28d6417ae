"""Files that clients send as pictures: good ones, broken ones and bombs, made without large memory.

Knows: the formats' bytes. Does not know: what a server does with them.
"""

import io
import struct
import zlib

from PIL import Image


def picture(format: str, width: int = 32, height: int = 24) -> bytes:
    """A small picture that is what it says."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, format)
    return buffer.getvalue()


def png(width: int, height: int, pixels: bytes) -> bytes:
    """A grey PNG that states a size, with these compressed pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


def bomb(width: int, height: int) -> bytes:
    """A PNG of zeros, a thousandth of the memory that it decodes to."""
    packer, row = zlib.compressobj(9), bytes(width + 1)
    return png(width, height, b"".join([*(packer.compress(row) for _ in range(height)), packer.flush()]))


def text_bomb() -> bytes:
    """A PNG with a comment of 100 MB, compressed to 100 kB."""
    packer, megabyte = zlib.compressobj(9), b"x" * 2**20
    comment = b"".join([*(packer.compress(megabyte) for _ in range(100)), packer.flush()])
    small = png(8, 8, zlib.compress(bytes(9 * 8)))
    return small[:33] + _chunk(b"zTXt", b"Comment\0\0" + comment) + small[33:]


def wide_webp() -> bytes:
    """A WebP animation of one tiny frame whose canvas would take a gigabyte."""
    side = (16_384 - 1).to_bytes(3, "little")
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "WEBP", lossless=True)
    frame = bytes(6) + (15).to_bytes(3, "little") * 2 + bytes(4) + buffer.getvalue()[12:]
    parts = [(b"VP8X", b"\x02\0\0\0" + side * 2), (b"ANIM", bytes(6)), (b"ANMF", frame)]
    body = b"WEBP" + b"".join(name + struct.pack("<I", len(data)) + data for name, data in parts)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
