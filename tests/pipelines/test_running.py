"""Whole jobs: events, results, cancel, failures, and what they leave behind."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from configs.attention import AttentionConfig
from configs.job import (
    JobCancelledError,
    JobEvent,
    JobFailedError,
    JobFinished,
    JobParameters,
    JobResult,
    StageFinished,
    StageStarted,
    StepFinished,
)
from configs.model_preset import ModelPreset
from pipelines import LoadedPipeline, load_pipeline, probe_mp4, run_job
from pipelines.mp4 import write_mp4
from tests.pipelines.stock import stock_frames
from tests.tiny_wan import tiny_preset, write_tiny_wan

# How often a job of 3 steps and 3 latent frames asks whether it is cancelled: at its start, before 2 text
# blocks, before 2 blocks and after each of 3 steps, before 3 latent frames, before 9 frames of the file.
AT_START, IN_TEXT = 1, 2
IN_FIRST_STEP, IN_SECOND_STEP, AFTER_LAST_STEP = 4, 8, 12
IN_DECODE, IN_FILE, LAST = 14, 20, 24


class CancelAt:
    """``is_cancelled`` that says yes from its n-th call on, or never."""

    def __init__(self, call: int | None = None) -> None:
        self.calls = 0
        self._call = call

    def __call__(self) -> bool:
        self.calls += 1
        return self._call is not None and self.calls >= self._call


def _run(loaded: LoadedPipeline, params: JobParameters, path: Path) -> tuple[JobResult, list[JobEvent]]:
    events = list(run_job(loaded, params, path, is_cancelled=CancelAt()))
    last = events[-1]
    assert isinstance(last, JobFinished)
    return last.result, events


def _fail(loaded: LoadedPipeline, params: JobParameters, path: Path) -> JobFailedError:
    with pytest.raises(JobFailedError) as caught:
        list(run_job(loaded, params, path, is_cancelled=CancelAt()))
    return caught.value


def _bytes_of_tensors() -> int:
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter)
    }
    return sum(storages.values())


def _hooks(loaded: LoadedPipeline) -> int:
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks)
        for network in (loaded.pipe.text_encoder, loaded.pipe.transformer, loaded.pipe.vae)
        for module in network.modules()
    )


def _processors(loaded: LoadedPipeline) -> list[object]:
    return [block.attn1.processor for block in loaded.pipe.transformer.blocks]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [each.name for each in threading.enumerate() if each.name.startswith("reelwright")] == []


def test_events_come_in_the_order_of_the_work(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    _, events = _run(loaded, params, tmp_path / "clip.mp4")
    shapes = [(type(event), getattr(event, "stage", None), getattr(event, "step", None)) for event in events]
    assert shapes == [
        (StageStarted, "text_encode", None),
        (StageFinished, "text_encode", None),
        (StageStarted, "denoise", None),
        (StepFinished, None, 1),
        (StepFinished, None, 2),
        (StepFinished, None, 3),
        (StageFinished, "denoise", None),
        (StageStarted, "vae_decode", None),
        (StageFinished, "vae_decode", None),
        (StageStarted, "encode_mp4", None),
        (StageFinished, "encode_mp4", None),
        (JobFinished, None, None),
    ]


def test_the_result_says_what_happened(loaded: LoadedPipeline, params: JobParameters, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    result, events = _run(loaded, params, path)
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
    result, _ = _run(loaded, params, tmp_path / "clip.mp4")
    assert result.warnings == ("prompt: 15 of 16 text tokens are used; cut: 'blue'",)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_dense_job_writes_the_stock_pipelines_clip(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path, scale: float
) -> None:
    params = params.model_copy(
        update={"attention": AttentionConfig(backend="dense"), "guidance_scale": scale}
    )
    result, _ = _run(loaded, params, tmp_path / "ours.mp4")
    stock = write_mp4(
        stock_frames(loaded, params), tmp_path / "stock.mp4", params.fps, before_frame=lambda: None
    )
    assert result.file == stock
    passes = 1 if scale == 1 else 2
    assert result.attention.dense_calls == 3 * 2 * passes
    assert result.attention.dense_reasons == {"backend": 3 * 2 * passes}
    assert (result.attention.density, result.attention.block_size) == (1.0, None)


def test_the_same_seed_is_the_same_clip_on_a_fresh_pipeline(
    loaded: LoadedPipeline, own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    first, _ = _run(loaded, params, tmp_path / "a.mp4")
    again, _ = _run(loaded, params, tmp_path / "b.mp4")
    fresh, _ = _run(own_pipeline, params, tmp_path / "c.mp4")
    other, _ = _run(loaded, params.model_copy(update={"seed": 6}), tmp_path / "d.mp4")
    assert first.file == again.file == fresh.file
    assert other.file.sha256 != first.file.sha256


def test_two_transformers_take_their_steps(
    tmp_path: Path, params: JobParameters, loaded: LoadedPipeline
) -> None:
    folder = write_tiny_wan(tmp_path / "two", two_transformers=True)
    two = load_pipeline(tiny_preset(folder), device="cpu", dtype="float32")
    sparse, _ = _run(two, params, tmp_path / "sparse.mp4")
    assert (sparse.attention.sparse_calls, sparse.attention.dense_calls) == (4, 2)
    params = params.model_copy(update={"attention": AttentionConfig(backend="dense")})
    dense, _ = _run(two, params, tmp_path / "dense.mp4")
    stock = write_mp4(
        stock_frames(two, params), tmp_path / "stock.mp4", params.fps, before_frame=lambda: None
    )
    assert dense.file == stock
    assert _run(loaded, params, tmp_path / "one.mp4")[0].file.sha256 != stock.sha256


def test_every_point_asks_whether_the_job_is_cancelled(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    flag = CancelAt()
    list(run_job(loaded, params, tmp_path / "clip.mp4", is_cancelled=flag))
    assert flag.calls == LAST


@pytest.mark.parametrize(
    ("call", "stage", "steps"),
    [
        (AT_START, None, 0),
        (IN_TEXT, "text_encode", 0),
        (IN_FIRST_STEP, "denoise", 0),
        (IN_SECOND_STEP, "denoise", 1),
        (AFTER_LAST_STEP, "denoise", 3),
        (IN_DECODE, "vae_decode", 3),
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
    expected, _ = _run(loaded, params, tmp_path / "expected.mp4")
    clips = tmp_path / "clips"
    clips.mkdir()
    hooks, processors, held = _hooks(own_pipeline), _processors(own_pipeline), _bytes_of_tensors()
    flag, events = CancelAt(call), list[JobEvent]()
    job = run_job(own_pipeline, params, clips / "clip.mp4", is_cancelled=flag)
    with pytest.raises(JobCancelledError) as caught:
        events.extend(job)
    assert flag.calls == call
    assert sum(isinstance(event, StepFinished) for event in events) == steps
    started = [event.stage for event in events if isinstance(event, StageStarted)]
    assert (started[-1] if started else None) == stage
    assert list(clips.iterdir()) == []
    # The error is still held here, and must not hold any tensor.
    assert caught.value is not None
    assert _bytes_of_tensors() == held
    assert _hooks(own_pipeline) == hooks
    assert _processors(own_pipeline) == processors
    after, _ = _run(own_pipeline, params, clips / "clip.mp4")
    assert after.file == expected.file


def test_closing_the_iterator_cancels_the_job(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    expected, _ = _run(loaded, params, tmp_path / "expected.mp4")
    events = run_job(
        loaded,
        params.model_copy(update={"num_inference_steps": 50}),
        tmp_path / "clip.mp4",
        is_cancelled=lambda: False,
    )
    assert next(events) == StageStarted("text_encode")
    events.close()  # type: ignore[attr-defined]  # an Iterator to callers, a generator in truth
    assert [path.name for path in tmp_path.iterdir()] == ["expected.mp4"]
    after, _ = _run(loaded, params, tmp_path / "clip.mp4")
    assert after.file == expected.file


def test_one_job_at_a_time(loaded: LoadedPipeline, params: JobParameters, tmp_path: Path) -> None:
    first = run_job(loaded, params, tmp_path / "first.mp4", is_cancelled=CancelAt())
    next(first)
    error = _fail(loaded, params, tmp_path / "second.mp4")
    assert (error.code, error.message) == ("internal", "model tiny-wan is busy with another job")
    assert isinstance(list(first)[-1], JobFinished)
    _run(loaded, params, tmp_path / "second.mp4")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("width", 72, "width 72 is not a multiple of 16; nearest valid: 64 or 80"),
        ("height", 0, "height 0 is not a multiple of 16; nearest valid: 16"),
        ("num_frames", 8, "num_frames 8 is not of the form 4k+1; nearest valid: 5 or 9"),
        ("num_inference_steps", 0, "num_inference_steps 0 is below 1"),
        ("fps", 0, "fps 0 is below 1"),
    ],
)
def test_what_the_pipeline_would_round_is_refused(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path, field: str, value: int, said: str
) -> None:
    error = _fail(loaded, params.model_copy(update={field: value}), tmp_path / "clip.mp4")
    assert (error.code, error.message) == ("invalid_input", said)


def test_bad_attention_fails_before_the_first_stage(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    bad = params.model_copy(update={"attention": AttentionConfig(dense_layers=(9,))})
    events = run_job(loaded, bad, tmp_path / "clip.mp4", is_cancelled=CancelAt())
    with pytest.raises(JobFailedError, match="dense_layers") as caught:
        next(events)
    assert caught.value.code == "invalid_input"


def test_a_missing_output_folder_fails_before_the_first_stage(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    events = run_job(loaded, params, tmp_path / "absent/clip.mp4", is_cancelled=CancelAt())
    with pytest.raises(JobFailedError, match=r"the output folder .*absent does not exist"):
        next(events)


def test_out_of_memory_names_the_stage_and_the_next_job_runs(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    expected, _ = _run(loaded, params, tmp_path / "expected.mp4")
    # Latents of 200 TB: more than an address space, so that no machine grants them.
    huge = params.model_copy(update={"width": 2**24, "height": 2**24})
    error = _fail(loaded, huge, tmp_path / "clip.mp4")
    assert (error.code, error.retryable) == ("out_of_memory", False)
    assert error.message.startswith("out of memory in denoise for 9 frames of 16777216x16777216 on cpu: ")
    after, _ = _run(loaded, params, tmp_path / "after.mp4")
    assert after.file == expected.file


def test_out_of_memory_inside_a_step_frees_everything(
    own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    def exhausted(module: object, inputs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    expected, _ = _run(own_pipeline, params, tmp_path / "expected.mp4")
    held = _bytes_of_tensors()
    hook = own_pipeline.pipe.transformer.blocks[1].register_forward_pre_hook(exhausted)
    error = _fail(own_pipeline, params, tmp_path / "clip.mp4")
    hook.remove()
    assert error.code == "out_of_memory"
    assert error.message == (
        "out of memory in denoise for 9 frames of 64x64 on cpu: "
        "CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert _bytes_of_tensors() == held
    after, _ = _run(own_pipeline, params, tmp_path / "after.mp4")
    assert after.file == expected.file


def test_a_clip_of_one_colour_is_no_result(
    own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    with torch.no_grad():
        own_pipeline.pipe.vae.decoder.conv_out.weight.zero_()
        own_pipeline.pipe.vae.decoder.conv_out.bias.fill_(-1)
    error = _fail(own_pipeline, params, tmp_path / "clip.mp4")
    assert (error.code, error.message) == (
        "bad_output",
        "every one of the 9 frames is a single flat colour (RGB (0, 0, 0))",
    )
    assert list(tmp_path.iterdir()) == []


def test_pictures_that_are_not_finite_are_no_result(
    own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    with torch.no_grad():
        own_pipeline.pipe.vae.decoder.conv_out.bias[0] = float("nan")
    error = _fail(own_pipeline, params, tmp_path / "clip.mp4")
    assert (error.code, error.message) == (
        "bad_output",
        f"decoded pictures: {9 * 64 * 64} of {9 * 64 * 64 * 3} values are NaN or infinite",
    )


def test_an_error_nobody_foresaw_is_internal_and_the_next_job_runs(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    def broken() -> bool:
        raise OSError("the pipe is closed")

    with pytest.raises(
        JobFailedError, match=r"OSError before the first stage .*the pipe is closed"
    ) as caught:
        list(run_job(loaded, params, tmp_path / "clip.mp4", is_cancelled=broken))
    assert caught.value.code == "internal"
    _run(loaded, params, tmp_path / "clip.mp4")


def test_a_device_that_breaks_does_not_hang_the_caller(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("pipelines.running.release_memory", broken)
    error = _fail(loaded, params, tmp_path / "clip.mp4")
    assert error.code == "internal"
    assert "an illegal memory access was encountered" in error.message


def test_bfloat16_jobs_run(preset: ModelPreset, params: JobParameters, tmp_path: Path) -> None:
    loaded = load_pipeline(preset, device="cpu", dtype="bfloat16")
    result, _ = _run(loaded, params, tmp_path / "clip.mp4")
    assert result.dtype == "bfloat16"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_jobs_on_a_gpu(preset: ModelPreset, params: JobParameters, tmp_path: Path) -> None:
    loaded = load_pipeline(preset, device="cuda")
    held = torch.cuda.memory_allocated()
    first, _ = _run(loaded, params, tmp_path / "a.mp4")
    assert (first.device, first.dtype, first.attention.implementation) == ("cuda:0", "bfloat16", "triton")
    assert first.metrics.peak_memory_bytes > held
    with pytest.raises(JobCancelledError):
        list(run_job(loaded, params, tmp_path / "b.mp4", is_cancelled=CancelAt(IN_SECOND_STEP)))
    assert torch.cuda.memory_allocated() <= held + 2**20
    again, _ = _run(loaded, params, tmp_path / "c.mp4")
    assert again.file == first.file
    larger = params.model_copy(update={"width": 256, "height": 256, "num_frames": 33})
    torch.cuda.set_per_process_memory_fraction(1e-4)
    try:
        assert _fail(loaded, larger, tmp_path / "d.mp4").code == "out_of_memory"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert _run(loaded, params, tmp_path / "e.mp4")[0].file == first.file
