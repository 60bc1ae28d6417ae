"""When previews come, and that none costs a job."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from configs.job import JobEvent, JobParameters, JobPaths, PreviewReady, StepFinished
from pipelines import LoadedPipeline, previewing, run_job
from pipelines.previewing import Previewer
from pipelines.projections import Projection
from tests.pipelines.jobs import CancelAt, finished

# Of the tiny model, whose latents have four channels and mean nothing.
PROJECTION = Projection(
    vae="tiny",
    source="invented for this test",
    latents_mean=(0.1, -0.2, 0.3, -0.4),
    latents_std=(1.5, 1.2, 0.9, 1.1),
    factors=((0.1, 0.2, 0.3), (0.3, 0.1, 0.2), (0.2, 0.3, 0.1), (0.1, 0.1, 0.1)),
    bias=(0.0, 0.1, 0.2),
)
LATENTS = torch.zeros(1, 4, 3, 8, 8)


@pytest.fixture
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(previewing, "shipped_projection", lambda loaded: PROJECTION)


def _run(loaded: LoadedPipeline, params: JobParameters, folder: Path, seconds: float) -> list[JobEvent]:
    paths = JobPaths(folder / "clip.mp4")
    return list(run_job(loaded, params, paths, is_cancelled=CancelAt(), preview_seconds=seconds))


@pytest.mark.usefixtures("_known")
def test_previews_follow_their_steps_but_not_the_last(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    events = _run(loaded, params, tmp_path, seconds=1e-9)
    seen = [(type(event), event.step) for event in events if isinstance(event, StepFinished | PreviewReady)]
    assert seen == [
        (StepFinished, 1),
        (PreviewReady, 1),
        (StepFinished, 2),
        (PreviewReady, 2),
        (StepFinished, 3),
    ]
    for event in events:
        if isinstance(event, PreviewReady):
            assert Image.open(io.BytesIO(event.jpeg)).format == "JPEG"


@pytest.mark.usefixtures("_known")
def test_previews_do_not_change_the_clip(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    without, events = finished(loaded, params, tmp_path / "without.mp4")
    assert not any(isinstance(event, PreviewReady) for event in events)
    _run(loaded, params, tmp_path, seconds=1e-9)
    assert (tmp_path / "clip.mp4").read_bytes() == (tmp_path / "without.mp4").read_bytes()
    assert without.warnings == ()


@pytest.mark.usefixtures("_known")
def test_previews_keep_their_distance(loaded: LoadedPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.0, 101.9, 102.0, 102.0, 102.1, 103.9, 104.5, 104.5])  # twice where one is made
    monkeypatch.setattr("pipelines.previewing.time.monotonic", lambda: next(times))
    events: list[PreviewReady] = []
    previewer = Previewer(loaded, 2.0, events.append, lambda text: None)
    for step in range(1, 7):
        previewer.show(step, LATENTS)
    assert [event.step for event in events] == [1, 3, 6]


@pytest.mark.usefixtures("_known")
def test_a_preview_takes_no_step_time(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0

    def slow(latents: torch.Tensor, projection: Projection) -> bytes:
        nonlocal clock
        clock += 1000
        return b""

    monkeypatch.setattr(previewing, "preview_jpeg", slow)
    monkeypatch.setattr("pipelines.denoise.time.perf_counter", lambda: clock)
    events = _run(loaded, params, tmp_path, seconds=1e-9)
    assert clock == 2000
    assert [event.seconds for event in events if isinstance(event, StepFinished)] == [0, 0, 0]


@pytest.mark.usefixtures("_known")
def test_a_preview_that_fails_is_one_warning(loaded: LoadedPipeline) -> None:
    events: list[PreviewReady] = []
    warnings: list[str] = []
    previewer = Previewer(loaded, 1e-9, events.append, warnings.append)
    for step in (1, 2):
        previewer.show(step, torch.zeros(1, 5, 3, 8, 8))
    assert events == []
    (warning,) = warnings
    assert warning.startswith("no previews from step 1 on: ValueError: latents have 5 channels")


def _previews(loaded: LoadedPipeline, params: JobParameters, folder: Path, seconds: float) -> list[int]:
    events = _run(loaded, params, folder, seconds)
    return [event.step for event in events if isinstance(event, PreviewReady)]


def test_a_vae_without_a_table_has_previews_from_its_second_job_on(
    own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    assert _previews(own_pipeline, params, tmp_path, seconds=1e-9) == []
    assert _previews(own_pipeline, params, tmp_path, seconds=1e-9) == [1, 2]


def test_nothing_is_learned_where_no_previews_are_asked_for(
    own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    assert _previews(own_pipeline, params, tmp_path, seconds=0) == []
    assert own_pipeline.colours.projection is None


@pytest.mark.usefixtures("_known")
def test_nothing_is_learned_of_a_vae_with_a_table(
    own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    assert _previews(own_pipeline, params, tmp_path, seconds=1e-9) == [1, 2]
    assert own_pipeline.colours.projection is None


def test_what_cannot_be_learned_from_is_one_warning(own_pipeline: LoadedPipeline) -> None:
    warnings: list[str] = []
    previewer = Previewer(own_pipeline, 1.0, lambda event: None, warnings.append)
    previewer.learn(LATENTS, np.zeros((8, 64, 64, 3), np.uint8))
    (warning,) = warnings
    assert warning.startswith("nothing was learned for previews: ValueError: 7 frames of 64x64")
