"""Encodes frames to an H.264 file while they are still being made.

Knows: ffmpeg, its arguments, and the thread that hands it frames. Does not know: whether the file is whole,
or what its comment says.
"""

import contextlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import IO

import imageio_ffmpeg
import numpy as np

from configs.job import JobFailedError
from pipelines.frames import Frames
from pipelines.mp4_tags import HEADER, with_comment

PIXEL_FORMAT = "yuv420p"
CRF = 18  # visually lossless
# RGB to BT.709 in video range, and said so in the stream; players guess differently when it is not said.
COLOURS = (
    "scale=out_color_matrix=bt709:out_range=tv:flags=accurate_rnd+full_chroma_int,"
    "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
)
# How often somebody who waits for ffmpeg looks whether to go on waiting.
CHECK_SECONDS = 0.1


class Encoder:
    """One run of ffmpeg, from its start to ``close``, which must be called however it went.

    Nobody who adds frames waits for ffmpeg: a thread hands them on, and those that it has not come to wait
    in memory. An ffmpeg that fails is found by ``finish``.

    Raises:
        JobFailedError: ``internal`` if ffmpeg cannot be run.
        OSError: there is no room beside ``path``.
    """

    def __init__(self, path: Path, width: int, height: int, fps: int, metadata: str | None) -> None:
        self._path = path
        self._added = self._written = 0
        self._waiting: SimpleQueue[Frames | None] = SimpleQueue()
        with contextlib.ExitStack() as on_failure:
            self._complaints = on_failure.enter_context(tempfile.TemporaryFile(dir=path.parent))
            with tempfile.TemporaryFile(dir=path.parent) as tags:
                tags.write((with_comment(metadata) if metadata is not None else HEADER).encode("utf-8"))
                tags.seek(0)
                arguments = _arguments(path, width, height, fps, tags.fileno())
                self._process = _start(arguments, tags, self._complaints)
            on_failure.callback(self._process.kill)
            self._thread = threading.Thread(target=self._hand_on, name="reelwright-encoder")
            self._thread.start()
            on_failure.pop_all()

    def add(self, frames: Frames) -> None:
        """Frames [F, H, W, 3] that follow those before, to be left as they are. Returns at once."""
        self._added += len(frames)
        self._waiting.put(np.ascontiguousarray(frames))

    def finish(self, while_waiting: Callable[[], None]) -> int:
        """Wait until the file is written: its frames. ``while_waiting`` is called now and then and may raise.

        Raises:
            JobFailedError: ``internal`` if ffmpeg failed, as on a full disk.
        """
        self._waiting.put(None)
        while self._thread.is_alive():
            while_waiting()
            self._thread.join(CHECK_SECONDS)
        if self._process.returncode != 0 or self._written < self._added:
            self._complaints.seek(0)
            said = self._complaints.read().decode("utf-8", "replace").strip() or "without a word"
            raise JobFailedError(
                "internal",
                f"ffmpeg stopped at frame {self._written} of {self._added} ({said[-300:]}); "
                f"{shutil.disk_usage(self._path.parent).free} bytes are free in {self._path.parent}",
                retryable=True,
            )
        return self._written

    def close(self) -> None:
        """End ffmpeg, if it is still at work, and the thread with it."""
        self._process.kill()
        self._waiting.put(None)
        self._thread.join()
        self._complaints.close()

    def _hand_on(self) -> None:
        """The thread: ends when ffmpeg has."""
        with self._process, contextlib.suppress(BrokenPipeError), _input(self._process) as pipe:
            while (frames := self._waiting.get()) is not None:
                for frame in frames:
                    pipe.write(frame.data)
                    self._written += 1


def _start(arguments: list[str], tags: IO[bytes], complaints: IO[bytes]) -> subprocess.Popen[bytes]:
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    try:
        return subprocess.Popen(
            [ffmpeg, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            pass_fds=[tags.fileno()],
            start_new_session=True,  # a Ctrl-C is for this program, which ends its jobs in order
        )
    except OSError as error:
        raise JobFailedError("internal", f"ffmpeg ({ffmpeg}) cannot be run: {error}") from error


def _arguments(path: Path, width: int, height: int, fps: int, tags: int) -> list[str]:
    # Metadata comes through a file and not in an argument: other users can read the arguments of a process.
    tags_in = ["-f", "ffmetadata", "-i", f"pipe:{tags}"]
    layout = ["-pix_fmt", "rgb24", "-video_size", f"{width}x{height}", "-r", str(fps)]
    frames_in = ["-f", "rawvideo", *layout, "-i", "pipe:0"]
    streams = ["-map", "1:v:0", "-map_metadata", "0"]
    codec = ["-c:v", "libx264", "-pix_fmt", PIXEL_FORMAT, "-crf", str(CRF), "-vf", COLOURS]
    container = ["-movflags", "+faststart", "-f", "mp4", str(path)]
    return ["-v", "error", "-y", *tags_in, *frames_in, *streams, *codec, *container]


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdin is None:
        raise TypeError("ffmpeg was started without a pipe")
    return process.stdin
