"""Shows a running job's latents now and then.

Knows: how often, and that no preview is worth a failed job. Does not know: how latents become a picture.
"""

import logging
import time
from collections.abc import Callable

import torch

from configs.job import PreviewReady
from pipelines.failures import first_line
from pipelines.loading import LoadedPipeline
from pipelines.previews import predicted_latents, preview_jpeg
from pipelines.projections import preview_projection

logger = logging.getLogger(__name__)
NEVER = float("inf")


class Previewer:
    """The previews of one job, at least ``seconds`` apart; none if that is 0, or for an unknown VAE."""

    def __init__(
        self,
        loaded: LoadedPipeline,
        seconds: float,
        emit: Callable[[PreviewReady], None],
        warn: Callable[[str], None],
    ) -> None:
        self._pipe = loaded.pipe
        self._seconds = seconds
        self._emit = emit
        self._warn = warn
        self._projection = preview_projection(loaded) if seconds > 0 else None
        self._due = NEVER if self._projection is None else 0.0

    def show(self, step: int, latents: torch.Tensor) -> None:
        """Emit a picture of the latents after ``step`` if the last one is old enough."""
        if self._projection is None or time.monotonic() < self._due:
            return
        try:
            jpeg = preview_jpeg(predicted_latents(self._pipe.scheduler, latents), self._projection)
        except Exception as error:  # a picture that nobody waits for must not cost hours of sampling
            logger.warning("preview failed", exc_info=error)
            self._warn(f"no previews from step {step} on: {type(error).__name__}: {first_line(error)}")
            self._due = NEVER
            return
        self._emit(PreviewReady(step, jpeg))
        self._due = time.monotonic() + self._seconds
