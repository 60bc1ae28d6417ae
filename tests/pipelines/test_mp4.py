"""MP4 files: written, decoded again, and what happens when they cannot be written."""

import contextlib
import hashlib
import json
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from pydantic import ValidationError

from configs.job import JobCancelledError, JobFailedError
from pipelines.frames import Frames
from pipelines.mp4 import Mp4Writer, check_ffmpeg, probe_mp4, read_manifest, write_mp4
from tests.configs.test_manifest import manifest_of
from tests.faults.processes import ffmpegs_of
from tests.pipelines.clips import decoded_frames, top_level_boxes


def _moving_square(count: int = 9, height: int = 64, width: int = 96) -> Frames:
    """A square that moves 2 pixels a frame, so that no two frames are alike."""
    frames = np.full((count, height, width, 3), (250, 240, 230), np.uint8)
    for index in range(count):
        frames[index, 20:40, 10 + 2 * index : 30 + 2 * index] = (30, 60, 200)
    return frames


def _noise(count: int = 40) -> Frames:
    """Frames that do not compress: about 20 kB each."""
    return np.random.default_rng(0).integers(0, 256, (count, 128, 128, 3), dtype=np.uint8)


def test_a_clip_is_what_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    found = write_mp4(_moving_square(), path, 16)
    assert (found.codec, found.pixel_format) == ("h264", "yuv420p")
    assert (found.width, found.height, found.frames, found.fps) == (96, 64, 9, 16.0)
    assert found.bytes == path.stat().st_size
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert probe_mp4(path) == found
    assert list(tmp_path.iterdir()) == [path]


def test_decoded_frames_are_the_ones_written(tmp_path: Path) -> None:
    frames = _moving_square()
    write_mp4(frames, tmp_path / "clip.mp4", 16)
    decoded = decoded_frames(tmp_path / "clip.mp4", 64, 96)
    assert decoded.shape == frames.shape
    error = np.abs(decoded.astype(int) - frames)
    # 4:2:0 blurs colour at edges; flat parts keep their colour to the rounding of 8-bit YUV.
    assert np.median(error) <= 1
    assert error[:, :16].max() <= 3
    assert error.mean() < 3


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)])
def test_colours_survive(tmp_path: Path, colour: tuple[int, int, int]) -> None:
    frames = np.full((3, 32, 32, 3), colour, np.uint8)
    write_mp4(frames, tmp_path / "clip.mp4", 8)
    decoded = decoded_frames(tmp_path / "clip.mp4", 32, 32)
    assert np.abs(decoded.astype(int) - colour).max() <= 3


def test_the_index_comes_before_the_pictures(tmp_path: Path) -> None:
    write_mp4(_noise(), tmp_path / "clip.mp4", 16)
    boxes = top_level_boxes(tmp_path / "clip.mp4")
    assert boxes[0] == "ftyp"
    assert boxes.index("moov") < boxes.index("mdat")


@pytest.mark.parametrize("fps", [1, 8, 16, 24, 25, 30, 60, 119, 120])
@pytest.mark.parametrize("count", [1, 5])
def test_frame_counts_and_rates(tmp_path: Path, count: int, fps: int) -> None:
    found = write_mp4(_moving_square(count), tmp_path / "clip.mp4", fps)
    assert (found.frames, found.fps) == (count, fps)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (18, 34), (480, 832), (46, 270)])
def test_sizes_are_kept_exactly(tmp_path: Path, height: int, width: int) -> None:
    found = write_mp4(_moving_square(2, height, width), tmp_path / "c.mp4", 16)
    assert (found.width, found.height) == (width, height)


@pytest.mark.parametrize(("height", "width"), [(63, 64), (64, 63)])
def test_odd_sides_are_refused(tmp_path: Path, height: int, width: int) -> None:
    with pytest.raises(JobFailedError, match=f"even sides, not {width}x{height}"):
        write_mp4(_moving_square(2, height, width), tmp_path / "clip.mp4", 16)
    assert list(tmp_path.iterdir()) == []


def test_the_same_frames_make_the_same_file(tmp_path: Path) -> None:
    first, second = (write_mp4(_moving_square(), tmp_path / name, 16) for name in ("a.mp4", "b.mp4"))
    assert first == second


def test_a_name_without_suffix_is_an_mp4_too(tmp_path: Path) -> None:
    write_mp4(_moving_square(), tmp_path / "clip", 16)
    assert top_level_boxes(tmp_path / "clip")[0] == "ftyp"


@pytest.mark.parametrize(
    "name", ["12:30.mp4", "-x.mp4", "a%d.mp4", "file:x.mp4", "ü" * 125 + ".mp4", "x" * 251 + ".mp4"]
)
def test_every_name_of_the_file_system_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = write_mp4(_moving_square(), Path(name), 16)
    assert probe_mp4(Path(name)) == found
    assert list(tmp_path.iterdir()) == [tmp_path / name]


@pytest.mark.parametrize("argument", ["libx264", "-f null"], ids=["encode", "probe"])
def test_cancel_while_ffmpeg_runs_leaves_nothing_and_keeps_an_old_file(tmp_path: Path, argument: str) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"old")

    def while_waiting() -> None:
        if any(argument in command for command in ffmpegs_of(os.getpid()).values()):
            raise JobCancelledError

    with pytest.raises(JobCancelledError):
        write_mp4(_noise(), path, 16, while_waiting=while_waiting)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"
    assert not ffmpegs_of(os.getpid())


def test_cancel_while_the_file_is_probed_ends_ffmpeg_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, started = tmp_path / "clips", tmp_path / "started"
    folder.mkdir()
    write_mp4(_moving_square(), folder / "clip.mp4", 16)
    script = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", _fake_ffmpeg(tmp_path, script))

    def while_waiting() -> None:
        if started.exists() and started.read_text():
            raise JobCancelledError

    with pytest.raises(JobCancelledError):
        probe_mp4(folder / "clip.mp4", while_waiting=while_waiting)
    assert not Path(f"/proc/{started.read_text()}").exists()


def test_the_old_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"old")

    def old_file_is_there() -> None:
        assert path.read_bytes() == b"old"

    write_mp4(_moving_square(), path, 16, while_waiting=old_file_is_there)
    assert probe_mp4(path).frames == 9


@pytest.fixture
def _no_room_for_files() -> Iterator[None]:
    """No file may grow beyond 64 kB, which looks to ffmpeg like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)


@pytest.mark.usefixtures("_no_room_for_files")
@pytest.mark.parametrize("count", [6, 200], ids=["found at the end", "found while writing"])
def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, count: int) -> None:
    with pytest.raises(JobFailedError) as caught:
        write_mp4(_noise(count), tmp_path / "clip.mp4", 16)
    assert caught.value.code == "internal"
    assert str(tmp_path) in caught.value.message
    assert list(tmp_path.iterdir()) == []


def _fake_ffmpeg(folder: Path, script: str) -> str:
    path = folder / "ffmpeg"
    path.write_text(f"#!{sys.executable}\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("script", ["raise SystemExit(1)", "import sys; sys.stdin.buffer.read()"])
def test_an_ffmpeg_that_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", _fake_ffmpeg(tmp_path, script))
    with pytest.raises(JobFailedError) as caught:
        write_mp4(_noise(), folder / "clip.mp4", 16)
    assert caught.value.code == "internal"
    assert list(folder.iterdir()) == []


def test_an_ffmpeg_that_stops_half_way_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; sys.stdin.buffer.read(128 * 128 * 3 * 5)"
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", _fake_ffmpeg(tmp_path, script))
    with pytest.raises(
        JobFailedError, match=r"ffmpeg stopped at frame \d+ of 40 .* bytes are free in"
    ) as caught:
        write_mp4(_noise(), tmp_path / "clip.mp4", 16)
    assert caught.value.retryable


def test_no_ffmpeg_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clip.mp4"
    write_mp4(_moving_square(), path, 16)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "absent"))
    with pytest.raises(JobFailedError, match=r"ffmpeg \(.*absent\) cannot be run"):
        write_mp4(_moving_square(), path, 16)
    with pytest.raises(JobFailedError, match=r"ffmpeg \(.*absent\) cannot be run"):
        probe_mp4(path)
    with pytest.raises(JobFailedError, match=r"ffmpeg \(.*absent\) cannot be run"):
        check_ffmpeg()
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", shutil.which("false") or "")
    with pytest.raises(JobFailedError, match="does not run"):
        check_ffmpeg()
    monkeypatch.undo()
    check_ffmpeg()


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match="absent") as caught:
        write_mp4(_moving_square(), tmp_path / "absent/clip.mp4", 16)
    assert caught.value.code == "internal"


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.95])
def test_a_file_that_is_not_whole_does_not_pass_the_probe(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "clip.mp4"
    found = write_mp4(_noise(), path, 16)
    path.write_bytes(path.read_bytes()[: int(found.bytes * kept)])
    with pytest.raises(JobFailedError, match="is no video that ffmpeg can decode"):
        probe_mp4(path)


def test_probing_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match="No such file"):
        probe_mp4(tmp_path / "absent.mp4")


HOSTILE_TEXTS = {
    "quotes": """say "hi" and 'ho' `$(x)`""",
    "lines": "one\r\ntwo\n\n  Stream #0:0: Video: vp9, rgb24, 2x2, 1 fps",
    "ffmetadata": "a=b;c#d\\e\n;FFMETADATA1\n[CHAPTER]\ncomment=x\\",
    "other scripts": "тень 影 🌀 e\u0301 \u202e \u2028 \x85",
    "control characters": "".join(map(chr, range(32))),
    "markup": "<udta>&amp;</udta>",
    "long": "ü \x01" * 3_333,
}


@pytest.mark.parametrize("prompt", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_the_manifest_comes_back_from_the_file(tmp_path: Path, prompt: str) -> None:
    path, manifest = tmp_path / "clip.mp4", manifest_of(prompt)
    write_mp4(_moving_square(), path, 16, metadata=manifest.model_dump_json())
    assert read_manifest(path) == manifest


def test_any_player_shows_the_manifest_as_the_comment(tmp_path: Path) -> None:
    path, metadata = tmp_path / "clip.mp4", manifest_of("a red circle").model_dump_json()
    write_mp4(_moving_square(), path, 16, metadata=metadata)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-i", str(path)]
    said = subprocess.run(command, capture_output=True, encoding="utf-8").stderr
    assert f"    comment         : {metadata[:200]}" in said  # it shows the beginning of long ones


def test_a_manifest_changes_neither_the_pictures_nor_the_order_of_the_file(tmp_path: Path) -> None:
    plain, tagged = tmp_path / "plain.mp4", tmp_path / "tagged.mp4"
    metadata = manifest_of("a red circle").model_dump_json()
    write_mp4(_moving_square(), plain, 16)
    write_mp4(_moving_square(), tagged, 16, metadata=metadata)
    assert np.array_equal(decoded_frames(plain, 64, 96), decoded_frames(tagged, 64, 96))
    assert top_level_boxes(plain) == top_level_boxes(tagged) == ["ftyp", "moov", "free", "mdat"]


def test_the_text_is_in_no_argument_of_a_process(tmp_path: Path) -> None:
    """Other users of a machine can read the arguments."""
    seen: list[bytes] = []

    secret = secrets.token_hex(8)
    with Mp4Writer(tmp_path / "clip.mp4", 96, 64, 16) as writer:
        writer.begin(secret)
        for arguments in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                seen.append(arguments.read_bytes())
        writer.add(_moving_square(1))
        writer.finish(lambda: None)
    assert any(b"libx264" in arguments for arguments in seen)
    assert not any(secret.encode() in arguments for arguments in seen)


@pytest.mark.parametrize("comment", [None, "", "hello", "[1]", '{"object": "video"}', '{"object": '])
def test_a_file_without_a_manifest(tmp_path: Path, comment: str | None) -> None:
    path = tmp_path / "clip.mp4"
    write_mp4(_moving_square(), path, 16, metadata=comment)
    assert read_manifest(path) is None


def test_a_manifest_of_another_version_is_no_missing_one(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    newer = json.dumps(manifest_of().model_dump(mode="json") | {"version": 2})
    write_mp4(_moving_square(), path, 16, metadata=newer)
    with pytest.raises(ValidationError, match="version"):
        read_manifest(path)


def test_reading_a_manifest_of_what_is_no_video(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"no video")
    for name in ("a.mp4", "absent.mp4"):
        with pytest.raises(JobFailedError, match=f"{name} is no file that ffmpeg can read"):
            read_manifest(tmp_path / name)
