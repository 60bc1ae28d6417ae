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
        self._own_peak_bytes = 0
        self._other_ranks: tuple[int, ...] = ()

    @contextlib.contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """A stage on the device; ``StageFinished`` is emitted only if it succeeds."""
        meter = peak_meter(self._device)
        with self._timed(stage):
            meter.start()
            try:
                yield
                synchronize(self._device)
            finally:
                own = meter.stop()
                self._own_peak_bytes = max(self._own_peak_bytes, own)
                others = self._other_ranks if stage == "denoise" else ()
                self._peak_bytes[stage] = max((own, *others))

    def note_other_ranks(self, peak_bytes: tuple[int, ...]) -> None:
        """Of ranks 1, 2, ... in the denoise, the only stage that they take part in."""
        self._other_ranks = peak_bytes

    @contextlib.contextmanager
    def stage_beside(self, stage: Stage) -> Iterator[None]:
        """A stage that needs no device: the next job may run on it, so its memory is not looked at."""
        with self._timed(stage):
            yield

    @contextlib.contextmanager
    def _timed(self, stage: Stage) -> Iterator[None]:
        self.current = stage
        self._emit(StageStarted(stage))
        start = time.perf_counter()
        yield
        seconds = self._seconds[stage] = time.perf_counter() - start
        self._emit(StageFinished(stage, seconds, self._peak_bytes.get(stage)))

    def metrics(self, steps: StepSeconds | None) -> JobMetrics:
        """The job so far; stages that an earlier attempt saved it are 0. The loader adds ``load_seconds``."""
        return JobMetrics(
            text_encode_seconds=self._seconds.get("text_encode", 0.0),
            step_seconds=steps,
            denoise_seconds=self._seconds.get("denoise", 0.0),
            vae_decode_seconds=self._seconds["vae_decode"],
            encode_seconds=self._seconds["encode_mp4"],
            total_seconds=time.perf_counter() - self._start,
            peak_memory_bytes=max(self._peak_bytes.values()),
            peak_memory_by_stage=dict(self._peak_bytes),
            peak_memory_by_rank=(self._own_peak_bytes, *self._other_ranks) if self._other_ranks else (),
        )
