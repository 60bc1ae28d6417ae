"""Real out-of-memory on a GPU: torch may use only a part of it, and a clip does not fit whole.

Run by hand on a GPU host: ``pytest -m gpu tests/faults/test_out_of_memory_gpu.py``. No server: the worker's
part of one is what meets the error.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from configs.job import JobFailedError, JobFinished, JobParameters, JobPaths, JobResult
from configs.memory import MemoryOptions
from configs.model_preset import find_model
from configs.resolve import GenerationRequest, resolve
from pipelines import LoadedPipeline, load_pipeline, run_job

pytestmark = pytest.mark.gpu

SMALL = {"size": "64x64", "num_frames": 5, "num_inference_steps": 2, "seed": 1}
LARGE = {"size": "256x256", "num_frames": 9, "num_inference_steps": 1, "seed": 1}  # most memory: to decode
LONG = LARGE | {"num_frames": 65}


@pytest.fixture(scope="module")
def loaded() -> LoadedPipeline:
    """The bundled model on the GPU, where it stays: no lower level of memory rescues a job."""
    memory = MemoryOptions("none")
    return load_pipeline(find_model("reelwright-shapes"), device="cuda:0", dtype="float32", memory=memory)


@pytest.fixture(scope="module")
def whole(loaded: LoadedPipeline, tmp_path_factory: pytest.TempPathFactory) -> JobResult:
    """The large clip with all the memory there is."""
    make(loaded, tmp_path_factory.mktemp("warm"), SMALL)
    return make(loaded, tmp_path_factory.mktemp("whole"), LARGE)


def make(loaded: LoadedPipeline, folder: Path, fields: Mapping[str, object]) -> JobResult:
    """Run a job to its end."""
    events = run_job(
        loaded, parameters(loaded, fields), JobPaths(folder / "clip.mp4"), is_cancelled=lambda: False
    )
    (result,) = [event.result for event in events if isinstance(event, JobFinished)]
    return result


def rungs(result: JobResult) -> tuple[str, ...]:
    """The ways to decode that were tried; the last one worked."""
    assert result.decode is not None
    return (*result.decode.failed, result.decode.rung)


def parameters(loaded: LoadedPipeline, fields: Mapping[str, object]) -> JobParameters:
    """A request, resolved."""
    request = GenerationRequest.model_validate({"prompt": "a red circle"} | dict(fields))
    return resolve(request, loaded.preset, loaded.preset.attention)


@contextmanager
def at_most(limit_bytes: float) -> Iterator[None]:
    """Let torch reserve only so much of the GPU."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(0)
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total, 0)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def test_a_clip_that_does_not_fit_whole_is_decoded_in_tiles(
    loaded: LoadedPipeline, whole: JobResult, tmp_path: Path
) -> None:
    torch.cuda.empty_cache()
    idle = torch.cuda.memory_allocated(0)
    peaks = whole.metrics.peak_memory_by_stage
    assert rungs(whole) == ("whole",)
    # Half of what the whole picture needs; a tile needs a quarter.
    limit = idle + 0.5 * (peaks["vae_decode"] - idle)
    assert peaks["denoise"] < limit, peaks
    with at_most(limit):
        result = make(loaded, tmp_path, LARGE)
    assert rungs(result) == ("whole", "small_tiles")
    assert (result.file.frames, result.file.width) == (whole.file.frames, whole.file.width)
    assert torch.cuda.memory_allocated(0) == idle
    print(f"idle {idle}, limit {limit:.0f}, whole {peaks}, then {result.decode}, {result.metrics}")
    again = make(loaded, tmp_path, LARGE)
    assert rungs(again) == ("whole",)
    assert again.file.sha256 == whole.file.sha256


def test_a_denoise_that_does_not_fit_fails_and_the_next_job_is_fine(
    loaded: LoadedPipeline, tmp_path: Path
) -> None:
    first = make(loaded, tmp_path, LONG)
    first_peak = first.metrics.peak_memory_by_stage["denoise"]
    (tmp_path / "clip.mp4").unlink()
    torch.cuda.empty_cache()
    idle = torch.cuda.memory_allocated(0)
    with at_most(idle + 0.5 * (first_peak - idle)), pytest.raises(JobFailedError) as caught:
        make(loaded, tmp_path, LONG)
    assert caught.value.code == "out_of_memory"
    assert "denoise" in caught.value.message
    assert torch.cuda.memory_allocated(0) == idle
    assert list(tmp_path.iterdir()) == []
    assert rungs(make(loaded, tmp_path, SMALL)) == ("whole",)
