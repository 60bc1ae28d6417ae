"""Whole jobs that are killed and go on from their checkpoint: the clip is the same, byte for byte."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from configs.job import (
    CheckpointSaved,
    JobCancelledError,
    JobEvent,
    JobFailedError,
    JobParameters,
    JobPaths,
    JobResult,
    StageStarted,
    StepFinished,
)
from pipelines import LoadedPipeline, load_pipeline, run_job
from tests.pipelines.jobs import CancelAt, bytes_of_tensors, finished

REPOSITORY = Path(__file__).parents[2]
STEPS = 6
# One process that loads the model, and one child of it for each job, which kills itself in the middle.
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from configs.job import JobParameters, JobPaths, StageStarted, StepFinished
from configs.model_preset import ModelPreset
from pipelines import load_pipeline, run_job

torch.set_num_threads(1)
preset, params, folder = sys.argv[1:4]
loaded = load_pipeline(ModelPreset.model_validate_json(preset), device="cpu", dtype="float32")
params = JobParameters.model_validate_json(params)
for last in map(int, sys.argv[4:]):
    child = os.fork()
    if child == 0:
        paths = JobPaths(Path(folder, f"{last}.mp4"), checkpoint=Path(folder, f"{last}.safetensors"))
        for event in run_job(loaded, params, paths, is_cancelled=lambda: False):
            if event == StageStarted("vae_decode") or (isinstance(event, StepFinished) and event.step > last):
                os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
"""


@pytest.fixture(scope="module")
def job(params: JobParameters) -> JobParameters:
    """Six guided steps of which three are dense, saved after each."""
    attention = params.attention.model_copy(update={"dense_steps": 3})
    return params.model_copy(
        update={
            "num_inference_steps": STEPS,
            "attention": attention,
            "guidance_scale": 4.0,
            "negative_prompt": "a black square",
            "prompt": "red " * 15 + "blue",
            "checkpoint_every": 1,
        }
    )


@pytest.fixture(scope="module")
def uninterrupted(
    loaded: LoadedPipeline, job: JobParameters, tmp_path_factory: pytest.TempPathFactory
) -> JobResult:
    """What the job makes when nothing happens."""
    return finished(loaded, job, tmp_path_factory.mktemp("whole") / "clip.mp4")[0]


def _stopped_after(loaded: LoadedPipeline, job: JobParameters, step: int, folder: Path) -> Path:
    """The checkpoint of a job that was stopped in the step after that one."""
    loaded.texts.clear()
    path = folder / "checkpoint.safetensors"
    # Start, 2 text blocks once for both texts, then for each step 2 blocks twice, its end, and the write.
    in_next_step = 1 + 2 + step * (4 + 1 + 1) + 1
    stopped = run_job(
        loaded, job, JobPaths(folder / "clip.mp4", checkpoint=path), is_cancelled=CancelAt(in_next_step)
    )
    with pytest.raises(JobCancelledError):
        list(stopped)
    return path


def _assert_same_clip(result: JobResult, expected: JobResult) -> None:
    # The file holds the manifest too, so attention and environment are the same.
    assert result.file == expected.file
    assert result.attention == expected.attention
    assert result.warnings == expected.warnings


def test_jobs_killed_in_four_places_end_with_the_same_clip(
    loaded: LoadedPipeline, job: JobParameters, uninterrupted: JobResult, tmp_path: Path
) -> None:
    preset, kills = loaded.preset.model_dump_json(), (1, 3, 5, STEPS)
    command = [sys.executable, "-c", KILLED, preset, job.model_dump_json(), str(tmp_path), *map(str, kills)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    for last in kills:
        checkpoint = tmp_path / f"{last}.safetensors"
        assert not (tmp_path / f"{last}.mp4").exists()
        result, events = finished(loaded, job, tmp_path / f"{last}.mp4", checkpoint)
        # The job's thread may be a few steps ahead of whoever reads the events and kills.
        assert result.resumed_from_step is not None
        assert last <= result.resumed_from_step
        steps = [event.step for event in events if isinstance(event, StepFinished)]
        assert steps == list(range(result.resumed_from_step + 1, STEPS + 1))
        _assert_same_clip(result, uninterrupted)


@pytest.mark.parametrize("last", [1, 2, 3, 4, 5])
def test_a_job_stopped_after_any_step_ends_with_the_same_clip(
    loaded: LoadedPipeline, job: JobParameters, uninterrupted: JobResult, tmp_path: Path, last: int
) -> None:
    path = _stopped_after(loaded, job, last, tmp_path)
    result, events = finished(loaded, job, tmp_path / "clip.mp4", path)
    assert result.resumed_from_step == last
    steps = [(event.step, event.total_steps) for event in events if isinstance(event, StepFinished)]
    assert steps == [(step, STEPS) for step in range(last + 1, STEPS + 1)]
    _assert_same_clip(result, uninterrupted)


def test_a_finished_denoise_goes_straight_to_the_decode(
    own_pipeline: LoadedPipeline, job: JobParameters, uninterrupted: JobResult, tmp_path: Path
) -> None:
    params = job.model_copy(update={"checkpoint_every": 0})
    path = tmp_path / "checkpoint.safetensors"
    first, events = finished(own_pipeline, params, tmp_path / "first.mp4", path)
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    assert saved == [CheckpointSaved(STEPS, path.stat().st_size)]
    for part in (own_pipeline.pipe.text_encoder, own_pipeline.pipe.transformer):
        part.forward = None  # whoever calls it fails
    result, events = finished(own_pipeline, params, tmp_path / "second.mp4", path)
    assert [event.stage for event in events if isinstance(event, StageStarted)] == [
        "vae_decode",
        "encode_mp4",
    ]
    assert not any(isinstance(event, StepFinished | CheckpointSaved) for event in events)
    assert result.resumed_from_step == STEPS
    assert (result.metrics.step_seconds, result.metrics.denoise_seconds) == (None, 0)
    assert result.warnings == uninterrupted.warnings
    _assert_same_clip(result, first)


def test_a_job_whose_checkpoint_is_damaged_begins_anew_and_says_so(
    loaded: LoadedPipeline, job: JobParameters, uninterrupted: JobResult, tmp_path: Path
) -> None:
    path = _stopped_after(loaded, job, 3, tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result, events = finished(loaded, job, tmp_path / "clip.mp4", path)
    assert result.resumed_from_step is None
    assert sum(isinstance(event, StepFinished) for event in events) == STEPS
    assert result.warnings == (
        "the checkpoint was not used, the job began at step 1: it cannot be read (its checksum is wrong)",
        *uninterrupted.warnings,
    )
    assert result.file == uninterrupted.file


def test_a_job_does_not_go_on_from_another_jobs_checkpoint(
    loaded: LoadedPipeline, job: JobParameters, tmp_path: Path
) -> None:
    path = _stopped_after(loaded, job, 3, tmp_path)
    other = job.model_copy(update={"seed": 6})
    expected, _ = finished(loaded, other, tmp_path / "expected.mp4")
    result, _ = finished(loaded, other, tmp_path / "clip.mp4", path)
    assert result.resumed_from_step is None
    assert result.warnings[0].endswith("it is another job's: parameters.seed")
    assert result.file == expected.file


def test_a_checkpoint_that_cannot_be_written_costs_a_warning(
    loaded: LoadedPipeline, job: JobParameters, uninterrupted: JobResult, tmp_path: Path
) -> None:
    result, events = finished(loaded, job, tmp_path / "clip.mp4", tmp_path / "absent/checkpoint.safetensors")
    assert not any(isinstance(event, CheckpointSaved) for event in events)
    *before, last = result.warnings
    assert tuple(before) == uninterrupted.warnings
    assert last.startswith("the checkpoint after step 1 could not be written: ")
    assert result.file == uninterrupted.file


def test_the_order_of_events(loaded: LoadedPipeline, job: JobParameters, tmp_path: Path) -> None:
    params = job.model_copy(update={"checkpoint_every": 4})
    _, events = finished(loaded, params, tmp_path / "clip.mp4", tmp_path / "checkpoint.safetensors")
    steps = [
        f"{type(event).__name__} {event.step}"
        for event in events
        if isinstance(event, StepFinished | CheckpointSaved)
    ]
    expected = [f"StepFinished {step}" for step in range(1, STEPS + 1)]
    expected.insert(4, "CheckpointSaved 4")
    assert steps == [*expected, "CheckpointSaved 6"]


def test_a_resumed_job_that_fails_leaves_nothing_in_memory(
    own_pipeline: LoadedPipeline, job: JobParameters, tmp_path: Path
) -> None:
    path = _stopped_after(own_pipeline, job, 3, tmp_path)
    held = bytes_of_tensors()

    def exhausted(module: object, inputs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    own_pipeline.pipe.transformer.proj_out.register_forward_pre_hook(exhausted)
    paths = JobPaths(tmp_path / "clip.mp4", checkpoint=path)
    with pytest.raises(JobFailedError, match="out of memory in denoise"):
        list(run_job(own_pipeline, job, paths, is_cancelled=CancelAt()))
    assert bytes_of_tensors() == held
    assert path.exists()


def test_cancel_while_a_checkpoint_is_written(
    loaded: LoadedPipeline, job: JobParameters, tmp_path: Path
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    paths = JobPaths(folder / "clip.mp4", checkpoint=folder / "checkpoint.safetensors")
    loaded.texts.clear()
    in_second_write = 1 + 2 + 2 * (4 + 1 + 1)
    events: list[JobEvent] = []
    job_run = run_job(loaded, job, paths, is_cancelled=CancelAt(in_second_write))
    with pytest.raises(JobCancelledError):
        events.extend(job_run)
    assert [event.step for event in events if isinstance(event, StepFinished)] == [1, 2]
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [1]
    assert [path.name for path in folder.iterdir()] == ["checkpoint.safetensors"]
    assert finished(loaded, job, paths.video, paths.checkpoint)[0].resumed_from_step == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("last", [1, 3, 5, STEPS])
def test_a_job_on_a_gpu_ends_with_the_same_clip(
    loaded: LoadedPipeline, job: JobParameters, tmp_path: Path, last: int
) -> None:
    on_gpu = load_pipeline(loaded.preset, device="cuda")
    expected, _ = finished(on_gpu, job, tmp_path / "expected.mp4")
    path = _stopped_after(on_gpu, job, last, tmp_path)
    result, _ = finished(on_gpu, job, tmp_path / "clip.mp4", path)
    assert result.resumed_from_step == last
    _assert_same_clip(result, expected)
