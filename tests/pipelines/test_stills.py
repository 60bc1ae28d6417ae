"""Thumbnails and sheets: what they show, how large they are, and a full disk."""

import hashlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from configs.job import JobFailedError, PictureFile
from pipelines.frames import Frames
from pipelines.stills import sheet_grid, write_spritesheet, write_thumbnail


def _grey_steps(count: int, height: int = 64, width: int = 96) -> Frames:
    """Frame i is grey of level 10 i, with a white stripe in the upper eighth."""
    frames = np.empty((count, height, width, 3), np.uint8)
    for index in range(count):
        frames[index] = 10 * index
        frames[index, : height // 8] = 255
    return frames


def _opened(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as picture:
        assert (picture.format, picture.mode) == ("JPEG", "RGB")
        return np.asarray(picture)


def _level(pixels: NDArray[np.uint8]) -> int:
    """Grey level of a frame of ``_grey_steps``, read below the stripe."""
    return int(np.median(pixels[len(pixels) // 2 :]))


@pytest.mark.parametrize("count", [1, 2, 5, 9, 24])
def test_the_thumbnail_is_the_middle_frame(tmp_path: Path, count: int) -> None:
    write_thumbnail(_grey_steps(count), tmp_path / "t.jpg")
    assert abs(_level(_opened(tmp_path / "t.jpg")) - 10 * ((count - 1) // 2)) <= 2


def test_the_thumbnail_avoids_flat_frames(tmp_path: Path) -> None:
    frames = _grey_steps(9)
    frames[3:6] = 0
    frames[6] = 60
    frames[6, ::2] = 65  # a fade is not yet a picture
    write_thumbnail(frames, tmp_path / "t.jpg")
    assert abs(_level(_opened(tmp_path / "t.jpg")) - 20) <= 2


def test_a_clip_of_flat_frames_still_has_a_thumbnail(tmp_path: Path) -> None:
    frames = np.full((3, 32, 32, 3), 7, np.uint8)
    frames[1] = 200
    write_thumbnail(frames, tmp_path / "t.jpg")
    assert abs(_level(_opened(tmp_path / "t.jpg")) - 200) <= 2


@pytest.mark.parametrize(
    ("height", "width", "wanted"),
    [
        (64, 96, (64, 96)),
        (512, 512, (512, 512)),
        (720, 1280, (288, 512)),
        (1280, 720, (512, 288)),
        (16, 1920, (4, 512)),
    ],
)
def test_the_thumbnails_size(tmp_path: Path, height: int, width: int, wanted: tuple[int, int]) -> None:
    made = write_thumbnail(_grey_steps(1, height, width), tmp_path / "t.jpg")
    assert (made.height, made.width) == wanted
    assert _opened(tmp_path / "t.jpg").shape == (*wanted, 3)


def test_colours_are_kept(tmp_path: Path) -> None:
    frames = np.full((1, 64, 64, 3), (30, 60, 200), np.uint8)
    write_thumbnail(frames, tmp_path / "t.jpg")
    assert np.abs(_opened(tmp_path / "t.jpg").astype(int) - (30, 60, 200)).max() <= 3


@pytest.mark.parametrize(
    ("count", "grid"),
    [
        *[(1, (1, 1)), (2, (2, 1)), (3, (2, 1)), (4, (2, 2)), (5, (2, 2)), (6, (3, 2)), (9, (3, 3))],
        *[(13, (4, 3)), (17, (4, 4)), (21, (5, 4)), (24, (5, 4)), (25, (5, 5)), (26, (5, 5)), (241, (5, 5))],
    ],
)
def test_the_grid_is_full_and_at_most_five_by_five(count: int, grid: tuple[int, int]) -> None:
    assert sheet_grid(count) == grid


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (1, [[0]]),
        (2, [[0, 1]]),
        (5, [[0, 1], [3, 4]]),
        (9, [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        (13, [[0, 1, 2, 3], [4, 5, 7, 8], [9, 10, 11, 12]]),
    ],
)
def test_the_sheet_shows_the_clip_from_first_to_last(
    tmp_path: Path, count: int, shown: list[list[int]]
) -> None:
    write_spritesheet(_grey_steps(count), tmp_path / "s.jpg")
    sheet = _opened(tmp_path / "s.jpg")
    assert sheet.shape == (64 * len(shown), 96 * len(shown[0]), 3)
    cells = [
        [
            _level(sheet[64 * row : 64 * row + 64, 96 * column : 96 * column + 96])
            for column in range(len(line))
        ]
        for row, line in enumerate(shown)
    ]
    assert np.abs(np.array(cells) - 10 * np.array(shown)).max() <= 2


@pytest.mark.parametrize(
    ("height", "width", "wanted"),
    [(480, 832, (92 * 3, 160 * 3)), (832, 480, (160 * 3, 92 * 3)), (64, 64, (192, 192))],
)
def test_the_sheets_size(tmp_path: Path, height: int, width: int, wanted: tuple[int, int]) -> None:
    made = write_spritesheet(_grey_steps(9, height, width), tmp_path / "s.jpg")
    assert (made.height, made.width) == wanted


def test_what_is_said_of_the_file_is_true_and_it_is_the_only_one(tmp_path: Path) -> None:
    for name, write in (("t.jpg", write_thumbnail), ("s.jpg", write_spritesheet)):
        made = write(_grey_steps(9), tmp_path / name)
        content = (tmp_path / name).read_bytes()
        height, width, _ = _opened(tmp_path / name).shape
        assert made == PictureFile(
            bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            content_type="image/jpeg",
            width=width,
            height=height,
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.jpg", "t.jpg"]


def test_the_same_frames_make_the_same_file(tmp_path: Path) -> None:
    for write in (write_thumbnail, write_spritesheet):
        assert write(_grey_steps(9), tmp_path / "a.jpg") == write(_grey_steps(9), tmp_path / "b.jpg")


@pytest.fixture
def _no_room_for_files() -> Iterator[None]:
    """No file may grow beyond 4 kB, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)


@pytest.mark.usefixtures("_no_room_for_files")
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (9, 128, 128, 3), dtype=np.uint8)
    for write in (write_thumbnail, write_spritesheet):
        with pytest.raises(JobFailedError, match=r"p\.jpg cannot be written: .*File too large") as caught:
            write(noise, tmp_path / "p.jpg")
        assert (caught.value.code, caught.value.retryable) == ("internal", True)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match=r"absent/p\.jpg cannot be written"):
        write_thumbnail(_grey_steps(1), tmp_path / "absent/p.jpg")
