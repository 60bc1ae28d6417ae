"""The next job on a pipeline starts while the last one writes its files."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.job import (
    DeviceReleased,
    JobCancelledError,
    JobEvent,
    JobFinished,
    JobParameters,
    JobPaths,
    StageFinished,
    StageStarted,
)
from pipelines import LoadedPipeline, run_job
from pipelines.mp4 import read_manifest
from tests.pipelines.jobs import IN_FILE, CancelAt, failure_of, finished


class Gate:
    """``is_cancelled`` that lets the job finish no file until it is open."""

    def __init__(self, *, then_cancel: bool = False) -> None:
        self._calls = 0
        self._is_open = threading.Event()
        self._then_cancel = then_cancel

    def __call__(self) -> bool:
        self._calls += 1
        if self._calls < IN_FILE:
            return False
        assert self._is_open.wait(60)
        return self._then_cancel

    def open(self) -> None:
        self._is_open.set()


def _until_released(events: Iterator[JobEvent]) -> list[JobEvent]:
    seen = []
    for event in events:
        seen.append(event)
        if isinstance(event, DeviceReleased):
            return seen
    raise AssertionError("the device was not released")


@pytest.fixture(autouse=True)
def _nothing_encoded_yet(loaded: LoadedPipeline) -> None:
    loaded.texts.clear()  # the gate counts the calls of a job that encodes its text


@pytest.fixture
def other(params: JobParameters) -> JobParameters:
    """Another clip, of another size."""
    return params.model_copy(update={"seed": 6, "width": 96, "prompt": "a blue square"})


def _all_paths(folder: Path, name: str) -> JobPaths:
    return JobPaths(
        folder / f"{name}.mp4",
        folder / f"{name}.thumbnail.jpg",
        folder / f"{name}.spritesheet.jpg",
        folder / f"{name}.safetensors",
    )


def test_two_overlapping_jobs_make_what_they_make_alone(
    loaded: LoadedPipeline, params: JobParameters, other: JobParameters, tmp_path: Path
) -> None:
    alone = [finished(loaded, job, tmp_path / "alone.mp4")[0] for job in (params, other)]
    loaded.texts.clear()
    gate, first_paths = Gate(), _all_paths(tmp_path, "first")
    first = run_job(loaded, params, first_paths, is_cancelled=gate)
    events = _until_released(first)
    assert not first_paths.video.exists()
    second, _ = finished(loaded, other, tmp_path / "second.mp4", tmp_path / "second.safetensors")
    assert not first_paths.video.exists()
    gate.open()
    events += first
    last = events[-1]
    assert isinstance(last, JobFinished)
    assert (last.result.file, second.file) == (alone[0].file, alone[1].file)
    manifest = read_manifest(first_paths.video)
    assert manifest is not None
    assert manifest.parameters == params
    # What was measured is this job's, not that of the one that ran meanwhile.
    assert list(last.result.metrics.peak_memory_by_stage) == ["text_encode", "denoise", "vae_decode"]
    measured = [event for event in events if isinstance(event, StageFinished)]
    assert measured[-1].stage == "encode_mp4"
    assert measured[-1].peak_memory_bytes is None
    for picture, path in (
        (last.result.thumbnail, first_paths.thumbnail),
        (last.result.spritesheet, first_paths.spritesheet),
    ):
        assert path is not None
        assert picture is not None
        assert path.stat().st_size == picture.bytes


def test_the_files_come_after_the_device(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    gate = Gate()
    gate.open()
    events = list(run_job(loaded, params, JobPaths(tmp_path / "clip.mp4"), is_cancelled=gate))
    released = events.index(DeviceReleased())
    assert isinstance(events[released - 1], StageFinished)
    assert events[released + 1] == StageStarted("encode_mp4")


def test_cancelling_the_one_that_writes_does_not_touch_the_one_that_runs(
    loaded: LoadedPipeline, params: JobParameters, other: JobParameters, tmp_path: Path
) -> None:
    alone, _ = finished(loaded, other, tmp_path / "alone.mp4")
    loaded.texts.clear()
    folder = tmp_path / "first"
    folder.mkdir()
    paths = _all_paths(folder, "first")
    gate = Gate(then_cancel=True)
    first = run_job(loaded, params, paths, is_cancelled=gate)
    _until_released(first)
    second = run_job(loaded, other, JobPaths(tmp_path / "second.mp4"), is_cancelled=CancelAt())
    next(second)
    gate.open()
    with pytest.raises(JobCancelledError):
        list(first)
    assert [path.name for path in folder.iterdir()] == ["first.safetensors"]
    # The first job's end does not free the pipeline that the second one holds.
    assert "busy" in failure_of(loaded, params, tmp_path / "third.mp4").message
    *_, last = second
    assert isinstance(last, JobFinished)
    assert last.result.file == alone.file
    finished(loaded, params, tmp_path / "third.mp4")


def test_closing_the_one_that_writes_waits_for_it_alone(
    loaded: LoadedPipeline, params: JobParameters, other: JobParameters, tmp_path: Path
) -> None:
    alone, _ = finished(loaded, other, tmp_path / "alone.mp4")
    loaded.texts.clear()
    gate = Gate()
    first = run_job(loaded, params, JobPaths(tmp_path / "first.mp4"), is_cancelled=gate)
    _until_released(first)
    second = run_job(loaded, other, JobPaths(tmp_path / "second.mp4"), is_cancelled=CancelAt())
    next(second)
    gate.open()
    first.close()  # type: ignore[attr-defined]  # an Iterator to callers, a generator in truth
    *_, last = second
    assert isinstance(last, JobFinished)
    assert last.result.file == alone.file
