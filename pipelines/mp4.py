"""Writes frames to an MP4 file that plays everywhere, and probes such files.

Knows: H.264, ffmpeg, files. Does not know: models or jobs. A file is at its name only when it is whole: it is
written beside it, flushed to disk, decoded again frame by frame, and then renamed.
"""

import hashlib
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import imageio_ffmpeg

from configs.job import JobFailedError, VideoFile
from pipelines.frames import Frames

CODEC = "h264"
PIXEL_FORMAT = "yuv420p"
CRF = 18  # visually lossless
TEMPORARY_SUFFIX = ".tmp.mp4"
MAX_STEM = 40  # characters of the final name in the temporary one; names end at 255 bytes
# RGB to BT.709 in video range, and said so in the stream; players guess differently when it is not said.
COLOURS = (
    "scale=out_color_matrix=bt709:out_range=tv:flags=accurate_rnd+full_chroma_int,"
    "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
)
_STREAM = re.compile(
    r"Stream #0:\d+.*?: Video: (?P<codec>\w+).*?, (?P<pixels>\w+)(?:\([^)]*\))?, "
    r"(?P<width>\d+)x(?P<height>\d+).*?, (?P<fps>[\d.]+) fps"
)
_FRAMES = re.compile(r"^frame=\s*(\d+)$", re.MULTILINE)


def write_mp4(frames: Frames, path: Path, fps: int, *, before_frame: Callable[[], None]) -> VideoFile:
    """Encode frames [F, H, W, 3] to ``path`` and return what probing the file found.

    ``before_frame`` is called before each frame; what it raises stops the writing and leaves nothing behind.

    Raises:
        JobFailedError: ``internal`` for odd sides, a failing ffmpeg, a full disk, or a file that is not what
            was asked.
    """
    count, height, width, _ = frames.shape
    if width % 2 or height % 2:
        raise JobFailedError("internal", f"H.264 in {PIXEL_FORMAT} needs even sides, not {width}x{height}")
    path = path.absolute()  # ffmpeg takes the "a" of a relative "a:b.mp4" for a protocol
    temporary = path.with_name(f".{path.stem[:MAX_STEM]}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        _encode(frames, temporary, fps, before_frame)
        _flush(temporary)
        found = probe_mp4(temporary)
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
        temporary.replace(path)
        _flush(path.parent)
    except OSError as error:
        raise JobFailedError("internal", f"{path} cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return found


def probe_mp4(path: Path) -> VideoFile:
    """Decode the whole file and say what it is; frames are counted, not read from a header.

    Raises:
        JobFailedError: ``internal`` if ffmpeg cannot decode it.
    """
    decode = ["-i", str(path.absolute()), "-map", "0:v:0", "-fps_mode", "passthrough", "-f", "null", "-"]
    strict = ["-hide_banner", "-nostdin", "-xerror", "-err_detect", "explode", "-progress", "pipe:1"]
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    try:
        done = subprocess.run(
            [ffmpeg, *strict, *decode],
            capture_output=True,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C is for this program, which ends its jobs in order
        )
    except OSError as error:
        raise JobFailedError("internal", f"ffmpeg ({ffmpeg}) cannot be run: {error}") from error
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


def _encode(frames: Frames, path: Path, fps: int, before_frame: Callable[[], None]) -> None:
    writer = imageio_ffmpeg.write_frames(
        path,
        (frames.shape[2], frames.shape[1]),
        fps=fps,
        codec="libx264",
        pix_fmt_out=PIXEL_FORMAT,
        quality=None,
        macro_block_size=1,
        ffmpeg_log_level="error",
        output_params=["-crf", str(CRF), "-vf", COLOURS, "-movflags", "+faststart", "-f", "mp4"],
    )
    written = 0
    try:
        writer.send(None)
        for frame in frames:
            before_frame()
            writer.send(frame.tobytes())
            written += 1
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise JobFailedError(
            "internal",
            f"ffmpeg stopped at frame {written} of {len(frames)} ({str(error).splitlines()[0]}); "
            f"{free} bytes are free in {path.parent}",
        ) from error
    finally:
        writer.close()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
