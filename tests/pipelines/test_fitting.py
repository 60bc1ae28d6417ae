"""How a job is fitted into memory that is limited, on a CPU."""

import dataclasses
from pathlib import Path

import pytest
import torch

from configs.fit import Room
from configs.job import JobFailedError, JobParameters, MemoryPlanned
from configs.memory import ClipShape, MemoryOptions, OffloadLevel
from configs.model_preset import ModelPreset
from pipelines import LoadedPipeline, load_pipeline
from pipelines.device_memory import available_bytes, in_use_meter
from pipelines.fitting import JobMemory, require_room, room_now, usable_bytes
from tests.pipelines.jobs import failure_of, finished

CPU = torch.device("cpu")
MIB = 2**20


def limited(loaded: LoadedPipeline, bytes_more: int) -> LoadedPipeline:
    """The pipeline in a process that may have so much more than it has now."""
    limit = in_use_meter(CPU)() + bytes_more
    return dataclasses.replace(loaded, memory_options=MemoryOptions(limit_bytes=limit))


def test_a_job_says_what_was_planned_and_what_was_measured(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    result, events = finished(loaded, params, tmp_path / "clip.mp4")
    (planned,) = [event.report for event in events if isinstance(event, MemoryPlanned)]
    assert result.memory == planned
    assert (planned.offload, planned.lowered_from, planned.feed_forward_chunks) == ("none", None, 1)
    assert set(planned.predicted_peak_by_stage) == set(result.metrics.peak_memory_by_stage)
    # Of a job this small nearly all is the process itself.
    for stage, predicted in planned.predicted_peak_by_stage.items():
        assert predicted == pytest.approx(result.metrics.peak_memory_by_stage[stage], rel=0.2)


def test_a_large_clip_is_refused_and_what_would_fit_is_made(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    short = limited(loaded, 150 * MIB)
    large = params.model_copy(update={"width": 512, "height": 512, "num_frames": 33})
    error = failure_of(short, large, tmp_path / "clip.mp4")
    assert error.code == "out_of_memory"
    assert error.message.startswith("33 frames of 512x512 would need ")
    assert error.message.endswith(" would fit")
    assert list(tmp_path.iterdir()) == []
    finished(short, params, tmp_path / "clip.mp4")


def test_a_decode_that_would_not_fit_begins_with_tiles(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    # A whole decode of this size is predicted to take 365 MiB, one in small tiles 27.
    large = params.model_copy(update={"width": 512, "height": 512, "num_frames": 1})
    result, _ = finished(limited(loaded, 80 * MIB), large, tmp_path / "clip.mp4")
    assert result.decode is not None
    assert (result.decode.rung, result.decode.failed) == ("small_tiles", ())


def test_an_operators_slices_are_taken(loaded: LoadedPipeline, params: JobParameters, tmp_path: Path) -> None:
    sliced = dataclasses.replace(loaded, memory_options=MemoryOptions(feed_forward_chunks=3))
    result, _ = finished(sliced, params, tmp_path / "clip.mp4")
    assert result.memory is not None
    assert result.memory.feed_forward_chunks == 3


@pytest.mark.parametrize("level", ["encoder", "model", "group"])
def test_a_cpu_has_no_other_place_for_weights(preset: ModelPreset, level: OffloadLevel) -> None:
    with pytest.raises(
        JobFailedError, match=f"offload={level} takes weights from a GPU to the host"
    ) as caught:
        load_pipeline(preset, device="cpu", dtype="float32", memory=MemoryOptions(level))
    assert caught.value.code == "model_load_failed"


def test_a_first_step_without_memory_is_tried_at_the_next_level(
    own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's levels on a CPU; the error is a GPU's, since a CPU has no level to go to."""
    expected, _ = finished(own_pipeline, params, tmp_path / "expected.mp4")
    levels = Room.of(2**40, is_gpu=True)
    monkeypatch.setattr("pipelines.fitting.room_now", lambda loaded: levels)
    tried: list[OffloadLevel] = []

    def exhausted(module: object, inputs: object) -> None:
        level = own_pipeline.placement.level
        if level not in tried:
            tried.append(level)
        if level in ("none", "encoder"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    hook = own_pipeline.pipe.transformer.blocks[1].register_forward_pre_hook(exhausted)
    result, events = finished(own_pipeline, params, tmp_path / "clip.mp4")
    hook.remove()
    assert tried == ["none", "encoder", "model"]
    assert result.memory is not None
    assert (result.memory.offload, result.memory.lowered_from) == ("model", "none")
    assert [event.report.offload for event in events if isinstance(event, MemoryPlanned)] == tried
    assert [warning.partition(":")[0] for warning in result.warnings] == [
        "offload none ran out of memory, encoder was tried",
        "offload encoder ran out of memory, model was tried",
    ]
    assert (result.file.frames, result.file.width) == (expected.file.frames, expected.file.width)


def test_less_memory_before_the_denoise_lowers_the_level(
    own_pipeline: LoadedPipeline, params: JobParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = [Room.of(2**40, is_gpu=True)]
    monkeypatch.setattr("pipelines.fitting.room_now", lambda loaded: rooms[-1])
    told: list[MemoryPlanned] = []
    memory = JobMemory(own_pipeline, params, told.append, lambda text: None)
    memory.begin()
    assert (memory.report.offload, told) == ("none", [])
    weights = own_pipeline.memory.weights_bytes
    rooms.append(Room(weights, rooms[0].levels, decodes_on_cpu_too=True))
    memory.look_again()
    assert memory.report.offload != "none"
    assert memory.report.lowered_from == "none"
    assert [event.report for event in told] == [memory.report]
    assert own_pipeline.placement.level == memory.report.offload
    own_pipeline.placement.set_level("none")


def test_the_limit_is_what_the_device_has(loaded: LoadedPipeline) -> None:
    short = limited(loaded, 10 * MIB)
    assert usable_bytes(short) == short.memory_options.limit_bytes
    assert usable_bytes(loaded) > usable_bytes(short)
    assert available_bytes(CPU, short.memory_options.limit_bytes) <= 10 * MIB + 2 * MIB
    assert room_now(short).levels == ("none",)
    with pytest.raises(JobFailedError, match="would need"):
        require_room(short, ClipShape(4096, 4096, 33))
