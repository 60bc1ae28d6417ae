"""The file is encoded while the clip is decoded: what ffmpeg has by then, and what if either fails."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.job import (
    DecodeReport,
    DeviceReleased,
    JobCancelledError,
    JobEvent,
    JobFailedError,
    JobFinished,
    JobParameters,
    JobPaths,
)
from pipelines import LoadedPipeline, run_job
from tests.faults import processes
from tests.pipelines.jobs import CancelAt, finished

LATENT_FRAMES = 3
FRAMES_BEFORE_THE_LAST_PART = 5
PATIENCE_SECONDS = 30


@pytest.fixture(scope="module")
def large(params: JobParameters) -> JobParameters:
    """More bytes than a pipe holds, and a picture that can be decoded in small tiles."""
    return params.model_copy(update={"width": 144, "height": 144})


@pytest.fixture
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert list(tmp_path.iterdir()) == []
    assert not processes.ffmpegs_of(os.getpid())


def _ffmpeg_with_frames(params: JobParameters) -> int:
    """The ffmpeg of this process, once it has read all frames but those of the last part."""
    wanted = FRAMES_BEFORE_THE_LAST_PART * params.width * params.height * 3

    def has_read() -> bool:
        return any(processes.read_bytes(pid) >= wanted for pid in processes.ffmpegs_of(os.getpid()))

    processes.wait_until(has_read, "ffmpeg has the first frames", PATIENCE_SECONDS)
    return processes.started_ffmpeg(os.getpid())


def _before_last_part(loaded: LoadedPipeline, work: Callable[[], object]) -> None:
    """Do that in the midst of the decode, when the decoder is asked for its last part."""
    calls: list[int] = []

    def before_call(module: object, inputs: object) -> None:
        calls.append(1)
        if len(calls) == LATENT_FRAMES:
            work()

    loaded.pipe.vae.decoder.register_forward_pre_hook(before_call)


def _until_released(events: Iterator[JobEvent]) -> None:
    for event in events:
        if isinstance(event, DeviceReleased):
            return
    raise AssertionError("the device was not released")


def test_ffmpeg_has_the_first_frames_before_the_decoder_is_asked_for_the_last(
    own_pipeline: LoadedPipeline, loaded: LoadedPipeline, large: JobParameters, tmp_path: Path
) -> None:
    expected, _ = finished(loaded, large, tmp_path / "expected.mp4")
    seen: list[int] = []
    _before_last_part(own_pipeline, lambda: seen.append(_ffmpeg_with_frames(large)))
    result, _ = finished(own_pipeline, large, tmp_path / "clip.mp4")
    assert len(seen) == 1
    assert result.file == expected.file


def test_a_lower_rung_starts_the_file_anew(
    own_pipeline: LoadedPipeline, loaded: LoadedPipeline, large: JobParameters, tmp_path: Path
) -> None:
    first: list[int] = []

    def exhausted() -> None:
        first.append(_ffmpeg_with_frames(large))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def at_once(module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[-1] > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    hook = loaded.pipe.vae.decoder.register_forward_pre_hook(at_once)
    expected, _ = finished(loaded, large, tmp_path / "expected.mp4")
    hook.remove()
    _before_last_part(own_pipeline, exhausted)
    result, _ = finished(own_pipeline, large, tmp_path / "clip.mp4")
    assert result.decode == DecodeReport(rung="small_tiles", failed=("whole",))
    assert result.file == expected.file
    assert result.file.frames == large.num_frames
    assert processes.state(first[0]) == "X"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip.mp4", "expected.mp4"]


@pytest.mark.usefixtures("_nothing_is_left")
def test_cancel_in_the_midst_of_the_decode(
    own_pipeline: LoadedPipeline, large: JobParameters, tmp_path: Path
) -> None:
    seen: list[int] = []
    _before_last_part(own_pipeline, lambda: seen.append(_ffmpeg_with_frames(large)))
    with pytest.raises(JobCancelledError):
        list(run_job(own_pipeline, large, JobPaths(tmp_path / "clip.mp4"), is_cancelled=lambda: bool(seen)))
    assert processes.state(seen[0]) == "X"


@pytest.mark.usefixtures("_nothing_is_left")
def test_a_clip_that_turns_out_bad_half_way(
    own_pipeline: LoadedPipeline, large: JobParameters, tmp_path: Path
) -> None:
    def spoil() -> None:
        _ffmpeg_with_frames(large)
        own_pipeline.pipe.vae.decoder.conv_out.bias.fill_(float("nan"))

    _before_last_part(own_pipeline, spoil)
    with pytest.raises(JobFailedError, match="NaN or infinite") as caught:
        finished(own_pipeline, large, tmp_path / "clip.mp4")
    assert caught.value.code == "bad_output"


@pytest.mark.usefixtures("_nothing_is_left")
def test_an_ffmpeg_killed_in_the_midst_of_the_decode(
    own_pipeline: LoadedPipeline, large: JobParameters, tmp_path: Path
) -> None:
    paths = JobPaths(tmp_path / "clip.mp4", tmp_path / "thumbnail.jpg", tmp_path / "sheet.jpg")
    _before_last_part(own_pipeline, lambda: processes.kill(_ffmpeg_with_frames(large)))
    events = run_job(own_pipeline, large, paths, is_cancelled=CancelAt())
    _until_released(events)
    with pytest.raises(JobFailedError, match=r"ffmpeg stopped at frame \d of 9") as caught:
        list(events)
    assert (caught.value.code, caught.value.retryable) == ("internal", True)


def test_the_device_does_not_wait_for_ffmpeg(
    own_pipeline: LoadedPipeline, loaded: LoadedPipeline, large: JobParameters, tmp_path: Path
) -> None:
    expected, _ = finished(loaded, large, tmp_path / "expected.mp4")
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(processes.started_ffmpeg(os.getpid()))
        processes.stop(stopped[0])

    hook = own_pipeline.pipe.vae.decoder.register_forward_pre_hook(_once(stop))
    first = run_job(own_pipeline, large, JobPaths(tmp_path / "clip.mp4"), is_cancelled=CancelAt())
    _until_released(first)
    hook.remove()
    assert finished(own_pipeline, large, tmp_path / "second.mp4")[0].file == expected.file
    assert processes.state(stopped[0]) == "T"
    processes.go_on(stopped[0])
    *_, last = first
    assert isinstance(last, JobFinished)
    assert last.result.file == expected.file


@pytest.mark.usefixtures("_nothing_is_left")
def test_cancel_while_ffmpeg_stands_still(
    own_pipeline: LoadedPipeline, large: JobParameters, tmp_path: Path
) -> None:
    def stop() -> None:
        processes.stop(processes.started_ffmpeg(os.getpid()))

    is_released = False
    own_pipeline.pipe.vae.decoder.register_forward_pre_hook(_once(stop))
    events = run_job(own_pipeline, large, JobPaths(tmp_path / "clip.mp4"), is_cancelled=lambda: is_released)
    _until_released(events)
    is_released = True
    with pytest.raises(JobCancelledError):
        list(events)


def _once(work: Callable[[], object]) -> Callable[[Any, Any], None]:
    """A hook that does that before the first call."""
    calls: list[int] = []

    def before_call(module: object, inputs: object) -> None:
        if not calls:
            calls.append(1)
            work()

    return before_call
