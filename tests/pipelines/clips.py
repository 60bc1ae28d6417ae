"""Reads MP4 files in ways that the code under test does not."""

import struct
import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray


def decoded_frames(path: Path, height: int, width: int) -> NDArray[np.uint8]:
    """All frames of the file, [F, height, width, 3], as a player would show them."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path)]
    raw = subprocess.run(
        [*command, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], capture_output=True, check=True
    ).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)


def top_level_boxes(path: Path) -> list[str]:
    """Types of the file's boxes in order. Raises ValueError if their sizes do not add up to the file."""
    data, names, offset = path.read_bytes(), [], 0
    while offset < len(data):
        size, name = struct.unpack_from(">I4s", data, offset)
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, offset + 8)
        if size < 8 or offset + size > len(data):
            raise ValueError(f"{path}: box {name!r} at {offset} has size {size}")
        names.append(name.decode("ascii"))
        offset += size
    return names
