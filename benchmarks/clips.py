"""Clips made the way the server makes them, kept as MP4 files so that an interrupted benchmark goes on.

Knows jobs and their files. Does not know what a clip should show.
"""

import hashlib
import subprocess
from collections import deque
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from configs.job import JobFinished, JobParameters, JobPaths, JobResult
from pipelines import LoadedPipeline, run_job


class Clip(BaseModel):
    """A finished job as it is kept beside its MP4: what was asked, of which weights, and how it went."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    params: JobParameters
    weights_sha256: str
    result: JobResult


def weights_sha256(folder: Path) -> str:
    """Digest of all safetensors files of a model folder, with their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.safetensors")):
        digest.update(path.relative_to(folder).as_posix().encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def make_clip(loaded: LoadedPipeline, params: JobParameters, weights: str, path: Path) -> JobResult:
    """Run the job, unless ``path`` holds its clip from these weights, on this device, already."""
    record = path.with_suffix(".json")
    if record.is_file():
        kept = Clip.model_validate_json(record.read_text(encoding="utf-8"))
        if (kept.params, kept.weights_sha256, kept.result.device, kept.result.dtype) == (
            params,
            weights,
            str(loaded.device),
            str(loaded.dtype).removeprefix("torch."),
        ):
            return kept.result
    (last,) = deque(run_job(loaded, params, JobPaths(path), is_cancelled=lambda: False), maxlen=1)
    if not isinstance(last, JobFinished):
        raise RuntimeError(f"a job ended with {last!r} instead of JobFinished")
    clip = Clip(params=params, weights_sha256=weights, result=last.result)
    unfinished = record.with_suffix(".json.tmp")
    unfinished.write_text(clip.model_dump_json(indent=1) + "\n", encoding="utf-8")
    unfinished.replace(record)
    return clip.result


def read_frames(path: Path, result: JobResult) -> NDArray[np.uint8]:
    """All frames of the finished MP4 [F, H, W, 3], as a player shows them."""
    return decode_frames(path, result.file.height, result.file.width)


def decode_frames(path: Path, height: int, width: int) -> NDArray[np.uint8]:
    """The same of any MP4 of that size."""
    ffmpeg = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path)]
    command = [*ffmpeg, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3)
