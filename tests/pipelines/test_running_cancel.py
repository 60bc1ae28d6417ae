"""Cancelled jobs: where they stop, and that they leave no trace."""

import gc
from pathlib import Path

import pytest
import torch

from configs.job import (
    JobCancelledError,
    JobEvent,
    JobParameters,
    JobPaths,
    StageStarted,
    StepFinished,
)
from configs.model_preset import ModelPreset
from pipelines import LoadedPipeline, load_pipeline, run_job
from tests.pipelines.jobs import (
    AFTER_LAST_STEP,
    AFTER_THUMBNAIL,
    AT_START,
    IN_DECODE,
    IN_FILE,
    IN_FIRST_STEP,
    IN_ROUNDING,
    IN_SECOND_STEP,
    IN_TEXT,
    CancelAt,
    bytes_of_tensors,
    finished,
    hook_count,
    self_attention_processors,
)


def test_every_point_asks_whether_the_job_is_cancelled(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    loaded.texts.clear()
    flag = CancelAt()
    list(run_job(loaded, params, JobPaths(tmp_path / "clip.mp4"), is_cancelled=flag))
    assert flag.calls > IN_FILE


@pytest.mark.parametrize(
    ("call", "stage", "steps"),
    [
        (AT_START, None, 0),
        (IN_TEXT, "text_encode", 0),
        (IN_FIRST_STEP, "denoise", 0),
        (IN_SECOND_STEP, "denoise", 1),
        (AFTER_LAST_STEP, "denoise", 3),
        (IN_DECODE, "vae_decode", 3),
        (IN_ROUNDING, "vae_decode", 3),
        (AFTER_THUMBNAIL, "encode_mp4", 3),
        (IN_FILE, "encode_mp4", 3),
    ],
)
def test_a_cancelled_job_leaves_no_trace(
    own_pipeline: LoadedPipeline,
    loaded: LoadedPipeline,
    params: JobParameters,
    tmp_path: Path,
    call: int,
    stage: str | None,
    steps: int,
) -> None:
    expected, _ = finished(loaded, params, tmp_path / "expected.mp4")
    clips = tmp_path / "clips"
    clips.mkdir()
    hooks, processors, held = (
        hook_count(own_pipeline),
        self_attention_processors(own_pipeline),
        bytes_of_tensors(),
    )
    flag, events = CancelAt(call), list[JobEvent]()
    job = run_job(own_pipeline, params, JobPaths(clips / "clip.mp4"), is_cancelled=flag)
    with pytest.raises(JobCancelledError) as caught:
        events.extend(job)
    assert flag.calls == call
    assert sum(isinstance(event, StepFinished) for event in events) == steps
    started = [event.stage for event in events if isinstance(event, StageStarted)]
    assert (started[-1] if started else None) == stage
    assert list(clips.iterdir()) == []
    # The error is still held here, and must not hold any tensor.
    assert caught.value is not None
    assert bytes_of_tensors() == held
    assert hook_count(own_pipeline) == hooks
    assert self_attention_processors(own_pipeline) == processors
    after, _ = finished(own_pipeline, params, clips / "clip.mp4")
    assert after.file == expected.file


def test_closing_the_iterator_cancels_the_job(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    expected, _ = finished(loaded, params, tmp_path / "expected.mp4")
    events = run_job(
        loaded,
        params.model_copy(update={"num_inference_steps": 50}),
        JobPaths(tmp_path / "clip.mp4"),
        is_cancelled=lambda: False,
    )
    assert next(events) == StageStarted("text_encode")
    events.close()  # type: ignore[attr-defined]  # an Iterator to callers, a generator in truth
    assert [path.name for path in tmp_path.iterdir()] == ["expected.mp4"]
    after, _ = finished(loaded, params, tmp_path / "clip.mp4")
    assert after.file == expected.file


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "call", [IN_TEXT, IN_FIRST_STEP, IN_SECOND_STEP, AFTER_LAST_STEP, IN_DECODE, IN_ROUNDING, IN_FILE]
)
def test_a_cancelled_job_gives_the_gpu_its_memory_back(
    preset: ModelPreset, params: JobParameters, tmp_path: Path, call: int
) -> None:
    on_gpu = load_pipeline(preset, device="cuda")
    finished(on_gpu, params, tmp_path / "first.mp4")
    on_gpu.texts.clear()
    gc.collect()
    held = torch.cuda.memory_allocated()
    with pytest.raises(JobCancelledError):
        list(run_job(on_gpu, params, JobPaths(tmp_path / "clip.mp4"), is_cancelled=CancelAt(call)))
    on_gpu.texts.clear()
    assert torch.cuda.memory_allocated() == held
