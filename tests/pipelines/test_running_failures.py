"""Jobs that fail: the error they end with, and the next job on the same pipeline."""

from pathlib import Path

import pytest
import torch

from configs.attention import AttentionConfig
from configs.job import (
    JobFailedError,
    JobFinished,
    JobParameters,
    JobPaths,
)
from pipelines import LoadedPipeline, run_job
from tests.pipelines.jobs import CancelAt, bytes_of_tensors, failure_of, finished


def test_one_job_at_a_time(loaded: LoadedPipeline, params: JobParameters, tmp_path: Path) -> None:
    first = run_job(loaded, params, JobPaths(tmp_path / "first.mp4"), is_cancelled=CancelAt())
    next(first)
    error = failure_of(loaded, params, tmp_path / "second.mp4")
    assert (error.code, error.message) == ("internal", "model tiny-wan is busy with another job")
    assert isinstance(list(first)[-1], JobFinished)
    finished(loaded, params, tmp_path / "second.mp4")


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
    error = failure_of(loaded, params.model_copy(update={field: value}), tmp_path / "clip.mp4")
    assert (error.code, error.message) == ("invalid_input", said)


def test_bad_attention_fails_before_the_first_stage(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    bad = params.model_copy(update={"attention": AttentionConfig(dense_layers=(9,))})
    events = run_job(loaded, bad, JobPaths(tmp_path / "clip.mp4"), is_cancelled=CancelAt())
    with pytest.raises(JobFailedError, match="dense_layers") as caught:
        next(events)
    assert caught.value.code == "invalid_input"


def test_a_missing_output_folder_fails_before_the_first_stage(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    events = run_job(loaded, params, JobPaths(tmp_path / "absent/clip.mp4"), is_cancelled=CancelAt())
    with pytest.raises(JobFailedError, match=r"the output folder .*absent does not exist"):
        next(events)


def test_a_clip_that_no_machine_has_room_for_is_refused_and_the_next_job_runs(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    expected, _ = finished(loaded, params, tmp_path / "expected.mp4")
    # Latents of 200 TB: more than an address space.
    huge = params.model_copy(update={"width": 2**24, "height": 2**24})
    error = failure_of(loaded, huge, tmp_path / "clip.mp4")
    assert (error.code, error.retryable) == ("out_of_memory", False)
    assert error.message.startswith("9 frames of 16777216x16777216 would need ")
    assert error.message.endswith(" would fit")
    after, _ = finished(loaded, params, tmp_path / "after.mp4")
    assert after.file == expected.file


def test_out_of_memory_inside_a_step_frees_everything(
    own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    def exhausted(module: object, inputs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    expected, _ = finished(own_pipeline, params, tmp_path / "expected.mp4")
    held = bytes_of_tensors()
    hook = own_pipeline.pipe.transformer.blocks[1].register_forward_pre_hook(exhausted)
    error = failure_of(own_pipeline, params, tmp_path / "clip.mp4")
    hook.remove()
    assert error.code == "out_of_memory"
    assert error.message == (
        "out of memory in denoise for 9 frames of 64x64 on cpu: "
        "CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert bytes_of_tensors() == held
    after, _ = finished(own_pipeline, params, tmp_path / "after.mp4")
    assert after.file == expected.file


def test_a_clip_of_one_colour_is_no_result(
    own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    with torch.no_grad():
        own_pipeline.pipe.vae.decoder.conv_out.weight.zero_()
        own_pipeline.pipe.vae.decoder.conv_out.bias.fill_(-1)
    error = failure_of(own_pipeline, params, tmp_path / "clip.mp4")
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
    error = failure_of(own_pipeline, params, tmp_path / "clip.mp4")
    assert (error.code, error.message) == (
        "bad_output",
        f"decoded pictures: {64 * 64} of {64 * 64 * 3} values are NaN or infinite",  # of the first part
    )


def test_an_error_nobody_foresaw_is_internal_and_the_next_job_runs(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    def broken() -> bool:
        raise OSError("the pipe is closed")

    with pytest.raises(
        JobFailedError, match=r"OSError before the first stage .*the pipe is closed"
    ) as caught:
        list(run_job(loaded, params, JobPaths(tmp_path / "clip.mp4"), is_cancelled=broken))
    assert caught.value.code == "internal"
    finished(loaded, params, tmp_path / "clip.mp4")


def test_a_device_that_breaks_does_not_hang_the_caller(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("pipelines.running.release_memory", broken)
    error = failure_of(loaded, params, tmp_path / "clip.mp4")
    assert error.code == "internal"
    assert "an illegal memory access was encountered" in error.message
