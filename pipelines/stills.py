"""JPEG pictures of a clip: one frame of it, and a sheet of many.

Knows: which frames to show and at what size. Does not know: models or jobs. Pictures are never enlarged.
"""

import hashlib
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from configs.job import JobFailedError, PictureFile
from pipelines.disk import written_beside
from pipelines.frames import Frames

CONTENT_TYPE = "image/jpeg"
QUALITY = 85
THUMBNAIL_SIDE = 512  # pixels of the longer side, at most
CELL_SIDE = 160  # the same of one picture in a sheet
SHEET_SIDE = 5  # pictures in a row and in a column, at most
# Levels of 255 between the darkest and the brightest pixel of a frame that shows nothing.
FLAT_LEVELS = 8


def write_thumbnail(frames: Frames, path: Path) -> PictureFile:
    """Write one frame of [F, H, W, 3]: the one nearest the middle that is not flat.

    Raises:
        JobFailedError: ``internal`` if the file cannot be written, as on a full disk.
    """
    return _write(_scaled(frames[_telling_frame(frames)], THUMBNAIL_SIDE), path)


def write_spritesheet(frames: Frames, path: Path) -> PictureFile:
    """Write evenly spaced frames of [F, H, W, 3] in rows, first and last included, as many as fill a grid.

    Raises:
        JobFailedError: ``internal`` if the file cannot be written, as on a full disk.
    """
    columns, rows = sheet_grid(len(frames))
    chosen = np.linspace(0, len(frames) - 1, columns * rows).round().astype(int)
    return _write(_sheet([_scaled(frames[index], CELL_SIDE) for index in chosen], columns), path)


def sheet_grid(count: int) -> tuple[int, int]:
    """Columns and rows of the sheet of that many frames: the largest full grid, square or a column wider."""
    rows = min(math.isqrt(count), SHEET_SIDE)
    columns = rows + 1 if rows < SHEET_SIDE and rows * (rows + 1) <= count else rows
    return columns, rows


def _telling_frame(frames: Frames) -> int:
    middle = (len(frames) - 1) // 2
    outwards = sorted(range(len(frames)), key=lambda index: abs(index - middle))
    return next((index for index in outwards if not _is_flat(frames[index])), middle)


def _is_flat(frame: Frames) -> bool:
    return bool((frame.max(axis=(0, 1)) - frame.min(axis=(0, 1)) <= FLAT_LEVELS).all())


def _scaled(frame: Frames, side: int) -> Image.Image:
    picture = Image.fromarray(frame)
    picture.thumbnail((side, side))
    return picture


def _sheet(cells: Sequence[Image.Image], columns: int) -> Image.Image:
    width, height = cells[0].size
    sheet = Image.new("RGB", (columns * width, len(cells) // columns * height))
    for index, cell in enumerate(cells):
        sheet.paste(cell, (index % columns * width, index // columns * height))
    return sheet


def _write(picture: Image.Image, path: Path) -> PictureFile:
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=QUALITY, optimize=True)
    content = data.getvalue()
    try:
        with written_beside(path, path.suffix) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise JobFailedError("internal", f"{path} cannot be written: {error}", retryable=True) from error
    return PictureFile(
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        content_type=CONTENT_TYPE,
        width=picture.width,
        height=picture.height,
    )
