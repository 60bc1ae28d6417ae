"""Writes frames to an MP4 file that plays everywhere, and probes such files.

Knows: H.264, ffmpeg, files, and the manifest in a file's comment. Does not know: models or jobs. A file is
at its name only when it is whole: it is written beside it, decoded again frame by frame, flushed to disk, and
then renamed.
"""

import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import imageio_ffmpeg

from configs.job import JobFailedError, VideoFile
from configs.manifest import Manifest
from pipelines.disk import written_beside
from pipelines.frames import Frames
from pipelines.mp4_tags import HEADER, comment_in, with_comment

CODEC = "h264"
PIXEL_FORMAT = "yuv420p"
CRF = 18  # visually lossless
# RGB to BT.709 in video range, and said so in the stream; players guess differently when it is not said.
COLOURS = (
    "scale=out_color_matrix=bt709:out_range=tv:flags=accurate_rnd+full_chroma_int,"
    "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
)
# From the start of a line: a comment can hold any text, but no line of its own.
_STREAM = re.compile(
    r"^  Stream #0:\d+.*?: Video: (?P<codec>\w+).*?, (?P<pixels>\w+)(?:\([^)]*\))?, "
    r"(?P<width>\d+)x(?P<height>\d+).*?, (?P<fps>[\d.]+) fps",
    re.MULTILINE,
)
_FRAMES = re.compile(r"^frame=\s*(\d+)$", re.MULTILINE)
# How often somebody who waits for ffmpeg looks whether to go on waiting.
CHECK_SECONDS = 0.1


def _nothing() -> None:
    """While waiting."""


def write_mp4(
    frames: Frames,
    path: Path,
    fps: int,
    *,
    before_frame: Callable[[], None],
    metadata: str | None = None,
) -> VideoFile:
    """Encode frames [F, H, W, 3] to ``path`` and return what probing the file found.

    ``before_frame`` is called before each frame, and now and then while the file is probed; what it raises
    stops the writing and leaves nothing behind.
    ``metadata`` becomes the file's comment; for ``read_manifest``, the JSON of a manifest.

    Raises:
        JobFailedError: ``internal`` for odd sides, a failing ffmpeg, a full disk, or a file that is not what
            was asked.
    """
    count, height, width, _ = frames.shape
    if width % 2 or height % 2:
        raise JobFailedError("internal", f"H.264 in {PIXEL_FORMAT} needs even sides, not {width}x{height}")
    path = path.absolute()  # ffmpeg takes the "a" of a relative "a:b.mp4" for a protocol
    try:
        with written_beside(path, ".mp4") as temporary:
            _encode(frames, temporary, fps, before_frame, metadata)
            found = probe_mp4(temporary, while_waiting=before_frame)
            wanted = found.model_copy(
                update={
                    "codec": CODEC,
                    "pixel_format": PIXEL_FORMAT,
                    "width": width,
                    "height": height,
                    "frames": count,
                    "fps": float(fps),
                }
            )
            if found != wanted:
                raise JobFailedError("internal", f"the MP4 written is {found!r}, asked was {wanted!r}")
            if (_comment(temporary, before_frame) or "") != (metadata or ""):
                raise JobFailedError("internal", "the MP4 written does not hold the metadata that was given")
    except OSError as error:
        raise JobFailedError("internal", f"{path} cannot be written: {error}", retryable=True) from error
    return found


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
        content = json.loads(_comment(path) or "")
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


def _comment(path: Path, while_waiting: Callable[[], None] = _nothing) -> str | None:
    wanted = ["-i", str(path.absolute()), "-f", "ffmetadata", "pipe:1"]
    done = _run(["-v", "error", "-nostdin", *wanted], while_waiting)
    if done.returncode != 0:
        reason = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise JobFailedError("internal", f"{path} is no file that ffmpeg can read: {reason}")
    return comment_in(done.stdout)


def _run(arguments: list[str], while_waiting: Callable[[], None]) -> subprocess.CompletedProcess[str]:
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
            while True:
                while_waiting()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said, complained = process.communicate(timeout=CHECK_SECONDS)
                    return subprocess.CompletedProcess(process.args, process.returncode, said, complained)
        except BaseException:
            process.kill()
            raise


def _encode(
    frames: Frames, path: Path, fps: int, before_frame: Callable[[], None], metadata: str | None
) -> None:
    written = 0
    with _ffmpeg_for(frames, path, fps, metadata) as (process, complaints):
        try:
            for frame in frames:
                before_frame()
                _pipe(process).write(frame.tobytes())
                written += 1
            _pipe(process).close()
            process.wait()
        except BrokenPipeError:
            process.wait()
        if process.returncode != 0 or written < len(frames):
            complaints.seek(0)
            said = complaints.read().decode("utf-8", "replace").strip() or "without a word"
            raise JobFailedError(
                "internal",
                f"ffmpeg stopped at frame {written} of {len(frames)} ({said[-300:]}); "
                f"{shutil.disk_usage(path.parent).free} bytes are free in {path.parent}",
                retryable=True,
            )


@contextlib.contextmanager
def _ffmpeg_for(
    frames: Frames, path: Path, fps: int, metadata: str | None
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """ffmpeg waiting for frames, and what it complains of; it is ended with the block, however that ends."""
    nameless = tempfile.TemporaryFile
    with nameless(dir=path.parent) as complaints, nameless(dir=path.parent) as tags:
        tags.write((with_comment(metadata) if metadata is not None else HEADER).encode("utf-8"))
        tags.seek(0)
        process = _start(_encode_options(frames, fps, tags.fileno(), path), tags, complaints)
        try:
            yield process, complaints
        finally:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                _pipe(process).close()
            process.wait()


def _start(arguments: list[str], tags: IO[bytes], complaints: IO[bytes]) -> subprocess.Popen[bytes]:
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    try:
        return subprocess.Popen(
            [ffmpeg, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            pass_fds=[tags.fileno()],
            start_new_session=True,
        )
    except OSError as error:
        raise JobFailedError("internal", f"ffmpeg ({ffmpeg}) cannot be run: {error}") from error


def _encode_options(frames: Frames, fps: int, tags: int, path: Path) -> list[str]:
    # Metadata comes through a file and not in an argument: other users can read the arguments of a process.
    tags_in = ["-f", "ffmetadata", "-i", f"pipe:{tags}"]
    layout = ["-pix_fmt", "rgb24", "-video_size", f"{frames.shape[2]}x{frames.shape[1]}", "-r", str(fps)]
    frames_in = ["-f", "rawvideo", *layout, "-i", "pipe:0"]
    streams = ["-map", "1:v:0", "-map_metadata", "0"]
    codec = ["-c:v", "libx264", "-pix_fmt", PIXEL_FORMAT, "-crf", str(CRF), "-vf", COLOURS]
    container = ["-movflags", "+faststart", "-f", "mp4", str(path)]
    return ["-v", "error", "-y", *tags_in, *frames_in, *streams, *codec, *container]


def _pipe(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdin is None:
        raise TypeError("ffmpeg was started without a pipe")
    return process.stdin
