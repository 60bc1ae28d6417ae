"""Times a job's stages and measures their memory.

Knows: which stage runs, since when, and its peak. Does not know: what a stage does.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from configs.job import JobMetrics, Stage, StageFinished, StageStarted, StepSeconds
from pipelines.denoise import synchronize
from pipelines.memory import peak_meter


class StageRecorder:
    """Emits the stage events of one job and keeps their numbers."""

    def __init__(self, device: torch.device, emit: Callable[[StageStarted | StageFinished], None]) -> None:
        self.current: Stage | None = None
        self._device = device
        self._emit = emit
        self._start = time.perf_counter()
        self._seconds: dict[Stage, float] = {}
        self._peak_bytes: dict[Stage, int] = {}

    @contextlib.contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """One stage; ``StageFinished`` is emitted only if it succeeds."""
        self.current = stage
        self._emit(StageStarted(stage))
        meter = peak_meter(self._device)
        meter.start()
        start = time.perf_counter()
        try:
            yield
            synchronize(self._device)
        finally:
            seconds, peak = time.perf_counter() - start, meter.stop()
        self._seconds[stage], self._peak_bytes[stage] = seconds, peak
        self._emit(StageFinished(stage, seconds, peak))

    def metrics(self, steps: StepSeconds) -> JobMetrics:
        """The job so far. Whoever loaded the model adds ``load_seconds``."""
        return JobMetrics(
            text_encode_seconds=self._seconds["text_encode"],
            step_seconds=steps,
            denoise_seconds=self._seconds["denoise"],
            vae_decode_seconds=self._seconds["vae_decode"],
            encode_seconds=self._seconds["encode_mp4"],
            total_seconds=time.perf_counter() - self._start,
            peak_memory_bytes=max(self._peak_bytes.values()),
            peak_memory_by_stage=dict(self._peak_bytes),
        )
