"""Whole jobs: events, results, and clips equal to the stock pipeline's."""

import gc
from pathlib import Path

import pytest
import torch

from configs.attention import AttentionConfig
from configs.job import (
    DeviceReleased,
    JobCancelledError,
    JobFinished,
    JobParameters,
    JobPaths,
    JobResult,
    MemoryPlanned,
    StageFinished,
    StageStarted,
    StepFinished,
    VideoFile,
)
from configs.manifest import Manifest
from configs.model_preset import ModelPreset
from pipelines import LoadedPipeline, load_pipeline, probe_mp4, run_job
from pipelines.mp4 import write_mp4
from tests.pipelines.jobs import IN_SECOND_STEP, CancelAt, failure_of, finished
from tests.pipelines.stock import stock_frames
from tests.tiny_wan import tiny_preset, write_tiny_wan


def _stock_file(loaded: LoadedPipeline, params: JobParameters, path: Path, result: JobResult) -> VideoFile:
    """The stock pipeline's frames, with our result's manifest."""
    assert result.environment is not None
    manifest = Manifest.of(params, result.attention, result.environment, result.memory).model_dump_json()
    frames = stock_frames(loaded, params)
    return write_mp4(frames, path, params.fps, metadata=manifest)


def test_events_come_in_the_order_of_the_work(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    _, events = finished(loaded, params, tmp_path / "clip.mp4")
    shapes = [(type(event), getattr(event, "stage", None), getattr(event, "step", None)) for event in events]
    assert shapes == [
        (StageStarted, "text_encode", None),
        (StageFinished, "text_encode", None),
        (StageStarted, "denoise", None),
        (MemoryPlanned, None, None),
        (StepFinished, None, 1),
        (StepFinished, None, 2),
        (StepFinished, None, 3),
        (StageFinished, "denoise", None),
        (StageStarted, "vae_decode", None),
        (StageFinished, "vae_decode", None),
        (DeviceReleased, None, None),
        (StageStarted, "encode_mp4", None),
        (StageFinished, "encode_mp4", None),
        (JobFinished, None, None),
    ]


def test_the_result_says_what_happened(loaded: LoadedPipeline, params: JobParameters, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    result, events = finished(loaded, params, path)
    assert result.file == probe_mp4(path)
    assert (result.file.width, result.file.height, result.file.frames, result.file.fps) == (64, 64, 9, 8.0)
    assert (result.device, result.dtype, result.warnings) == ("cpu", "float32", ())
    attention = result.attention
    assert (attention.backend, attention.implementation, attention.tokens) == ("anchor_local", "torch", 48)
    assert (attention.block_size, attention.anchor_stride, attention.anchor_offset) == (32, 17, 0)
    # 3 steps of 2 layers, the first step dense.
    assert (attention.sparse_calls, attention.dense_calls) == (4, 2)
    assert attention.dense_reasons == {"dense_steps": 2}
    assert 0 < attention.density < 1
    steps = [event.seconds for event in events if isinstance(event, StepFinished)]
    assert result.metrics.step_seconds is not None
    assert result.metrics.step_seconds.median == sorted(steps)[1]
    assert result.metrics.step_seconds.max == max(steps)
    assert result.metrics.denoise_seconds > sum(steps)
    assert result.metrics.peak_memory_bytes > 0


def test_warnings_reach_the_result(loaded: LoadedPipeline, params: JobParameters, tmp_path: Path) -> None:
    params = params.model_copy(update={"prompt": "red " * 15 + "blue"})
    result, _ = finished(loaded, params, tmp_path / "clip.mp4")
    assert result.warnings == ("prompt: 15 of 16 text tokens are used; cut: 'blue'",)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_dense_job_writes_the_stock_pipelines_clip(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path, scale: float
) -> None:
    params = params.model_copy(
        update={"attention": AttentionConfig(backend="dense"), "guidance_scale": scale}
    )
    result, _ = finished(loaded, params, tmp_path / "ours.mp4")
    assert result.file == _stock_file(loaded, params, tmp_path / "stock.mp4", result)
    passes = 1 if scale == 1 else 2
    assert result.attention.dense_calls == 3 * 2 * passes
    assert result.attention.dense_reasons == {"backend": 3 * 2 * passes}
    assert (result.attention.density, result.attention.block_size) == (1.0, None)


def test_the_same_seed_is_the_same_clip_on_a_fresh_pipeline(
    loaded: LoadedPipeline, own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    first, _ = finished(loaded, params, tmp_path / "a.mp4")
    again, _ = finished(loaded, params, tmp_path / "b.mp4")
    fresh, _ = finished(own_pipeline, params, tmp_path / "c.mp4")
    other, _ = finished(loaded, params.model_copy(update={"seed": 6}), tmp_path / "d.mp4")
    assert first.file == again.file == fresh.file
    assert other.file.sha256 != first.file.sha256


def test_two_transformers_take_their_steps(
    tmp_path: Path, params: JobParameters, loaded: LoadedPipeline
) -> None:
    folder = write_tiny_wan(tmp_path / "two", two_transformers=True)
    two = load_pipeline(tiny_preset(folder), device="cpu", dtype="float32")
    sparse, _ = finished(two, params, tmp_path / "sparse.mp4")
    assert (sparse.attention.sparse_calls, sparse.attention.dense_calls) == (4, 2)
    params = params.model_copy(update={"attention": AttentionConfig(backend="dense")})
    dense, _ = finished(two, params, tmp_path / "dense.mp4")
    assert dense.file == _stock_file(two, params, tmp_path / "stock.mp4", dense)
    assert finished(loaded, params, tmp_path / "one.mp4")[0].file.sha256 != dense.file.sha256


def test_bfloat16_jobs_run(preset: ModelPreset, params: JobParameters, tmp_path: Path) -> None:
    loaded = load_pipeline(preset, device="cpu", dtype="bfloat16")
    result, _ = finished(loaded, params, tmp_path / "clip.mp4")
    assert result.dtype == "bfloat16"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_jobs_on_a_gpu(preset: ModelPreset, params: JobParameters, tmp_path: Path) -> None:
    loaded = load_pipeline(preset, device="cuda")
    weights = torch.cuda.memory_allocated()
    first, _ = finished(loaded, params, tmp_path / "a.mp4")
    assert (first.device, first.dtype, first.attention.implementation) == ("cuda:0", "bfloat16", "triton")
    assert first.metrics.peak_memory_bytes > weights
    loaded.texts.clear()
    held = torch.cuda.memory_allocated()  # with the workspace of cuBLAS, which stays
    gc.collect()
    assert torch.cuda.memory_allocated() == held, "tensors of a finished job waited for the garbage collector"
    with pytest.raises(JobCancelledError):
        list(run_job(loaded, params, JobPaths(tmp_path / "b.mp4"), is_cancelled=CancelAt(IN_SECOND_STEP)))
    loaded.texts.clear()
    assert torch.cuda.memory_allocated() <= held
    again, _ = finished(loaded, params, tmp_path / "c.mp4")
    assert again.file == first.file
    larger = params.model_copy(update={"width": 256, "height": 256, "num_frames": 33})
    torch.cuda.set_per_process_memory_fraction(1e-4)
    try:
        assert failure_of(loaded, larger, tmp_path / "d.mp4").code == "out_of_memory"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert finished(loaded, params, tmp_path / "e.mp4")[0].file == first.file
