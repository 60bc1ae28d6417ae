"""Frames encoded as they come: parts, new starts, and an ffmpeg that is slow or dies."""

import os
from pathlib import Path

import numpy as np
import pytest

from configs.job import JobFailedError
from pipelines.frames import Frames
from pipelines.mp4 import Mp4Writer, write_mp4
from tests.faults import processes
from tests.pipelines.clips import decoded_frames

SIDE = 128
FRAME_BYTES = SIDE * SIDE * 3
PATIENCE_SECONDS = 30


def _noise(count: int, seed: int = 0) -> Frames:
    return np.random.default_rng(seed).integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)


def _nothing() -> None:
    """While waiting."""


def _ffmpeg() -> int:
    """The one that runs."""
    return processes.started_ffmpeg(os.getpid())


def _writer(folder: Path) -> Mp4Writer:
    return Mp4Writer(folder / "clip.mp4", SIDE, SIDE, 16)


def _until_it_has_read(pid: int, frames: int) -> None:
    wanted = frames * FRAME_BYTES
    processes.wait_until(lambda: processes.read_bytes(pid) >= wanted, "ffmpeg has frames", PATIENCE_SECONDS)


def test_parts_make_the_file_of_the_whole(tmp_path: Path) -> None:
    clip = _noise(9)
    whole = write_mp4(clip, tmp_path / "whole.mp4", 16, metadata="a comment")
    with _writer(tmp_path) as writer:
        writer.begin("a comment")
        for part in (clip[:1], clip[1:5], clip[5:]):
            writer.add(part)
        assert writer.finish(_nothing) == whole


def test_frames_that_do_not_lie_in_one_piece(tmp_path: Path) -> None:
    clip = _noise(9)
    whole = write_mp4(clip, tmp_path / "whole.mp4", 16)
    strided = np.asfortranarray(clip)
    assert write_mp4(strided, tmp_path / "clip.mp4", 16) == whole


def test_ffmpeg_takes_frames_before_the_last_one_is_there(tmp_path: Path) -> None:
    with _writer(tmp_path) as writer:
        writer.begin(None)
        writer.add(_noise(5))
        _until_it_has_read(_ffmpeg(), 5)
        writer.add(_noise(4, seed=1))
        assert writer.finish(_nothing).frames == 9
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_another_start_ends_the_first(tmp_path: Path) -> None:
    with _writer(tmp_path) as writer:
        writer.begin("the first")
        first = _ffmpeg()
        writer.add(_noise(5, seed=1))
        writer.begin("the second")
        assert processes.state(first) == "X"
        writer.add(_noise(2))
        found = writer.finish(_nothing)
    assert found == write_mp4(_noise(2), tmp_path / "alone.mp4", 16, metadata="the second")
    assert len(decoded_frames(tmp_path / "clip.mp4", SIDE, SIDE)) == 2


@pytest.mark.parametrize("taken", [0, 5])
def test_what_is_not_finished_leaves_nothing(tmp_path: Path, taken: int) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"old")
    with _writer(tmp_path) as writer:
        writer.begin(None)
        writer.add(_noise(taken))
        _until_it_has_read(_ffmpeg(), taken)
    assert not processes.ffmpegs_of(os.getpid())
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]
    assert (tmp_path / "clip.mp4").read_bytes() == b"old"


def test_nobody_waits_for_an_ffmpeg_that_stands_still(tmp_path: Path) -> None:
    with _writer(tmp_path) as writer:
        writer.begin(None)
        ffmpeg = _ffmpeg()
        processes.stop(ffmpeg)
        writer.add(_noise(40))  # 2 MB: more than a pipe holds
        assert processes.state(ffmpeg) == "T"
        processes.go_on(ffmpeg)
        assert writer.finish(_nothing).frames == 40


def test_an_ffmpeg_that_stands_still_is_ended(tmp_path: Path) -> None:
    with _writer(tmp_path) as writer:
        writer.begin(None)
        processes.stop(_ffmpeg())
        writer.add(_noise(40))
    assert not processes.ffmpegs_of(os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_an_ffmpeg_that_is_killed_is_found_at_the_end(tmp_path: Path) -> None:
    with _writer(tmp_path) as writer:
        writer.begin(None)
        writer.add(_noise(5))
        _until_it_has_read(_ffmpeg(), 5)
        processes.kill(_ffmpeg())
        writer.add(_noise(40))
        with pytest.raises(JobFailedError, match=r"ffmpeg stopped at frame \d+ of 45") as caught:
            writer.finish(_nothing)
    assert (caught.value.code, caught.value.retryable) == ("internal", True)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_found_at_the_start(tmp_path: Path) -> None:
    with _writer(tmp_path / "absent") as writer, pytest.raises(JobFailedError, match="cannot be written"):
        writer.begin(None)
