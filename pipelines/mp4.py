"""Writes frames to an MP4 file that plays everywhere, and probes such files.

Knows: H.264, ffmpeg, files, and the manifest in a file's comment. Does not know: models or jobs. A file is
at its name only when it is whole: it is written beside it, decoded again frame by frame, flushed to disk, and
then renamed.
"""

import contextlib
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import imageio_ffmpeg

from configs.job import JobFailedError, VideoFile
from configs.manifest import Manifest
from pipelines.disk import put_in_place, temporary_beside
from pipelines.encoding import CHECK_SECONDS, PIXEL_FORMAT, Encoder
from pipelines.frames import Frames
from pipelines.mp4_tags import comment_in

CODEC = "h264"
# From the start of a line: a comment can hold any text, but no line of its own.
_STREAM = re.compile(
    r"^  Stream #0:\d+.*?: Video: (?P<codec>\w+).*?, (?P<pixels>\w+)(?:\([^)]*\))?, "
    r"(?P<width>\d+)x(?P<height>\d+).*?, (?P<fps>[\d.]+) fps",
    re.MULTILINE,
)
_FRAMES = re.compile(r"^frame=\s*(\d+)$", re.MULTILINE)


def _nothing() -> None:
    """While waiting."""


class Mp4Writer:
    """Writes a clip to ``path``, encoding its frames as they come: ``begin``, ``add`` ..., ``finish``.

    Another ``begin`` starts over. After the with block nothing is left of a file that was not finished, and
    ``path`` is as it was.

    Raises:
        JobFailedError: ``internal`` for odd sides; from ``begin`` and ``finish`` for a failing ffmpeg, a
            full disk, or a file that is not what was asked.
    """

    def __init__(self, path: Path, width: int, height: int, fps: int) -> None:
        if width % 2 or height % 2:
            raise JobFailedError(
                "internal", f"H.264 in {PIXEL_FORMAT} needs even sides, not {width}x{height}"
            )
        self._path = path.absolute()  # ffmpeg takes the "a" of a relative "a:b.mp4" for a protocol
        self._width = width
        self._height = height
        self._fps = fps
        self._metadata: str | None = None
        self._encoder: Encoder | None = None
        self._temporary = temporary_beside(self._path, ".mp4")

    def begin(self, metadata: str | None) -> None:
        """Start ffmpeg. ``metadata`` becomes the file's comment; for ``read_manifest``, a manifest's JSON."""
        self._drop()
        self._metadata = metadata
        with _as_job_failure(self._path):
            self._encoder = Encoder(self._temporary, self._width, self._height, self._fps, metadata)

    def add(self, frames: Frames) -> None:
        """Frames [F, H, W, 3] that follow those before. Returns at once, whatever ffmpeg does."""
        self._begun().add(frames)

    def finish(self, while_waiting: Callable[[], None]) -> VideoFile:
        """Put the file in its place and return what probing it found.

        ``while_waiting`` is called now and then; what it raises ends the writing.
        """
        with _as_job_failure(self._path):
            frames = self._begun().finish(while_waiting)
            found = self._checked(frames, while_waiting)
            put_in_place(self._temporary, self._path)
        return found

    def _checked(self, frames: int, while_waiting: Callable[[], None]) -> VideoFile:
        """What probing the file finds; it must be what was asked, its comment too."""
        with _running(_comment_arguments(self._temporary)) as reading:
            found = probe_mp4(self._temporary, while_waiting=while_waiting)
            comment = _comment(self._temporary, _outcome(reading, while_waiting))
        wanted = found.model_copy(
            update={
                "codec": CODEC,
                "pixel_format": PIXEL_FORMAT,
                "width": self._width,
                "height": self._height,
                "frames": frames,
                "fps": float(self._fps),
            }
        )
        if found != wanted:
            raise JobFailedError("internal", f"the MP4 written is {found!r}, asked was {wanted!r}")
        if (comment or "") != (self._metadata or ""):
            raise JobFailedError("internal", "the MP4 written does not hold the metadata that was given")
        return found

    def _begun(self) -> Encoder:
        if self._encoder is None:
            raise RuntimeError("begin comes first")
        return self._encoder

    def _drop(self) -> None:
        encoder, self._encoder = self._encoder, None
        if encoder is not None:
            encoder.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._drop()


def write_mp4(
    frames: Frames,
    path: Path,
    fps: int,
    *,
    while_waiting: Callable[[], None] = _nothing,
    metadata: str | None = None,
) -> VideoFile:
    """Write a clip [F, H, W, 3] whose frames are all there; see ``Mp4Writer``."""
    _, height, width, _ = frames.shape
    with Mp4Writer(path, width, height, fps) as writer:
        writer.begin(metadata)
        writer.add(frames)
        return writer.finish(while_waiting)


def probe_mp4(path: Path, *, while_waiting: Callable[[], None] = _nothing) -> VideoFile:
    """Decode the whole file and say what it is; frames are counted, not read from a header.

    ``while_waiting`` is called now and then; what it raises ends the probe.

    Raises:
        JobFailedError: ``internal`` if ffmpeg cannot decode it.
    """
    decode = ["-i", str(path.absolute()), "-map", "0:v:0", "-fps_mode", "passthrough", "-f", "null", "-"]
    strict = ["-hide_banner", "-nostdin", "-xerror", "-err_detect", "explode", "-progress", "pipe:1"]
    done = _run([*strict, *decode], while_waiting)
    stream, counts = _STREAM.search(done.stderr), _FRAMES.findall(done.stdout)
    if done.returncode != 0 or stream is None or not counts:
        reason = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise JobFailedError("internal", f"{path} is no video that ffmpeg can decode: {reason}")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return VideoFile(
        bytes=path.stat().st_size,
        sha256=sha256,
        codec=stream["codec"],
        pixel_format=stream["pixels"],
        width=int(stream["width"]),
        height=int(stream["height"]),
        frames=int(counts[-1]),
        fps=float(stream["fps"]),
    )


def read_manifest(path: Path) -> Manifest | None:
    """The manifest that a file's comment holds; None if the comment is anything else, or there is none.

    Raises:
        JobFailedError: ``internal`` if ffmpeg cannot read the file.
        ValueError: the comment is a manifest that this version cannot read; the message says why.
    """
    try:
        content = json.loads(_comment(path, _run(_comment_arguments(path), _nothing)) or "")
    except json.JSONDecodeError:
        return None
    if not isinstance(content, dict) or content.get("object") != Manifest.model_fields["object"].default:
        return None
    return Manifest.model_validate(content)


def check_ffmpeg() -> None:
    """Raises JobFailedError when there is no ffmpeg that runs; better known before a job than after it."""
    done = _run(["-version"], _nothing)
    if done.returncode != 0:
        raise JobFailedError("internal", f"ffmpeg does not run: {done.stderr.strip()[-500:]}")


@contextlib.contextmanager
def _as_job_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JobFailedError("internal", f"{path} cannot be written: {error}", retryable=True) from error


def _comment_arguments(path: Path) -> list[str]:
    return ["-v", "error", "-nostdin", "-i", str(path.absolute()), "-f", "ffmetadata", "pipe:1"]


def _comment(path: Path, done: subprocess.CompletedProcess[str]) -> str | None:
    if done.returncode != 0:
        reason = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise JobFailedError("internal", f"{path} is no file that ffmpeg can read: {reason}")
    return comment_in(done.stdout)


def _run(arguments: list[str], while_waiting: Callable[[], None]) -> subprocess.CompletedProcess[str]:
    with _running(arguments) as process:
        return _outcome(process, while_waiting)


@contextlib.contextmanager
def _running(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """ffmpeg, which is ended if the block raises."""
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    try:
        process = subprocess.Popen(
            [ffmpeg, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # a Ctrl-C is for this program, which ends its jobs in order
        )
    except OSError as error:
        raise JobFailedError("internal", f"ffmpeg ({ffmpeg}) cannot be run: {error}") from error
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _outcome(
    process: subprocess.Popen[str], while_waiting: Callable[[], None]
) -> subprocess.CompletedProcess[str]:
    while True:
        while_waiting()
        with contextlib.suppress(subprocess.TimeoutExpired):
            said, complained = process.communicate(timeout=CHECK_SECONDS)
            return subprocess.CompletedProcess(process.args, process.returncode, said, complained)
