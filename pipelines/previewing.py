"""Shows a running job's latents now and then.

Knows: how often, which map from latents to colours serves, and that no preview is worth a failed job. Does
not know: how latents become a picture, or how a map is learned.
"""

import logging
import time
from collections.abc import Callable

import torch

from configs.job import PreviewReady
from pipelines.failures import first_line
from pipelines.frames import Frames
from pipelines.loading import LoadedPipeline
from pipelines.previews import predicted_latents, preview_jpeg
from pipelines.projections import Projection, find_projection

logger = logging.getLogger(__name__)
NEVER = float("inf")


class Previewer:
    """The previews of one job, at least ``seconds`` apart; none if that is 0.

    A VAE that no table is for has none in its first job, whose clip teaches the map for later ones.
    """

    def __init__(
        self,
        loaded: LoadedPipeline,
        seconds: float,
        emit: Callable[[PreviewReady], None],
        warn: Callable[[str], None],
    ) -> None:
        self._loaded = loaded
        self._seconds = seconds
        self._emit = emit
        self._warn = warn
        shipped = shipped_projection(loaded)
        self._projection = (shipped or loaded.colours.projection) if seconds > 0 else None
        self._learns = seconds > 0 and shipped is None
        self._due = NEVER if self._projection is None else 0.0

    def show(self, step: int, latents: torch.Tensor) -> None:
        """Emit a picture of the latents after ``step`` if the last one is old enough."""
        if self._projection is None or time.monotonic() < self._due:
            return
        try:
            jpeg = preview_jpeg(predicted_latents(self._loaded.pipe.scheduler, latents), self._projection)
        except Exception as error:  # a picture that nobody waits for must not cost hours of sampling
            logger.warning("preview failed", exc_info=error)
            self._warn(f"no previews from step {step} on: {type(error).__name__}: {first_line(error)}")
            self._due = NEVER
            return
        self._emit(PreviewReady(step, jpeg))
        self._due = time.monotonic() + self._seconds

    def learn(self, latents: torch.Tensor, frames: Frames) -> None:
        """Have later jobs' previews profit from what these latents were decoded to."""
        colours = self._loaded.colours
        if not self._learns or colours.is_done:
            return
        mean, std = _statistics(self._loaded)
        temporal = self._loaded.preset.geometry.vae_temporal
        try:
            colours.learn(latents, frames, vae_temporal=temporal, latents_mean=mean, latents_std=std)
        except Exception as error:
            logger.warning("colours of latents were not learned", exc_info=error)
            self._warn(f"nothing was learned for previews: {type(error).__name__}: {first_line(error)}")


def shipped_projection(loaded: LoadedPipeline) -> Projection | None:
    """The table for the pipeline's VAE, or None."""
    return find_projection(*_statistics(loaded))


def _statistics(loaded: LoadedPipeline) -> tuple[tuple[float, ...], tuple[float, ...]]:
    config = loaded.pipe.vae.config
    return tuple(config.latents_mean), tuple(config.latents_std)
