"""Shows a running job's latents now and then.

Knows: how often, and that no preview is worth a failed job. Does not know: how latents become a picture.
"""

from collections.abc import Callable

import torch

from configs.job import PreviewReady
from pipelines.loading import LoadedPipeline


class Previewer:
    """The previews of one job, at least ``seconds`` apart; none if that is 0."""

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
        self._due = 0.0 if seconds > 0 else float("inf")

    def show(self, step: int, latents: torch.Tensor) -> None:
        """Emit a picture of the latents after ``step`` if the last one is old enough."""
