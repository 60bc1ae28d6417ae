"""Stage events and metrics."""

import numpy as np
import pytest
import torch

from configs.job import Stage, StageFinished, StageStarted, StepSeconds
from pipelines.stages import StageRecorder

JOB_STAGES: tuple[Stage, ...] = ("text_encode", "denoise", "vae_decode", "encode_mp4")
STEPS = StepSeconds(median=1.0, p95=2.0, max=3.0)


def test_events_and_metrics_tell_the_same() -> None:
    events: list[StageStarted | StageFinished] = []
    recorder = StageRecorder(torch.device("cpu"), events.append)
    for stage in JOB_STAGES:
        with recorder.stage_beside(stage) if stage == "encode_mp4" else recorder.stage(stage):
            assert events[-1] == StageStarted(stage)
            assert recorder.current == stage
    finished = [event for event in events if isinstance(event, StageFinished)]
    assert [event.stage for event in finished] == list(JOB_STAGES)
    metrics = recorder.metrics(STEPS)
    assert metrics.step_seconds == STEPS
    assert [event.seconds for event in finished] == [
        metrics.text_encode_seconds,
        metrics.denoise_seconds,
        metrics.vae_decode_seconds,
        metrics.encode_seconds,
    ]
    assert metrics.total_seconds >= sum(event.seconds for event in finished)
    # What runs beside the next job says nothing of its memory.
    assert finished[-1].peak_memory_bytes is None
    assert metrics.peak_memory_by_stage == {
        event.stage: event.peak_memory_bytes for event in finished if event.stage != "encode_mp4"
    }
    assert metrics.peak_memory_bytes == max(metrics.peak_memory_by_stage.values())
    assert metrics.load_seconds == 0


def test_a_peak_belongs_to_its_stage() -> None:
    recorder = StageRecorder(torch.device("cpu"), lambda event: None)
    for stage in JOB_STAGES:
        with recorder.stage(stage):
            if stage == "denoise":
                np.ones(2**28, dtype=np.uint8)
    peaks = recorder.metrics(STEPS).peak_memory_by_stage
    assert peaks["denoise"] > max(peaks["text_encode"], peaks["vae_decode"]) + 2**27


def test_a_failed_stage_does_not_finish() -> None:
    events: list[StageStarted | StageFinished] = []
    recorder = StageRecorder(torch.device("cpu"), events.append)
    with pytest.raises(ZeroDivisionError), recorder.stage("denoise"):
        _ = 1 / 0
    assert events == [StageStarted("denoise")]
    assert recorder.current == "denoise"
