"""The denoise stage: noise and embeddings to latents, one event a step.

Knows: the pipeline's own sampling loop and its step callback. Does not know: text, pictures, files.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from attention import SwapHandle
from configs.job import JobParameters, StepFinished, StepSeconds
from pipelines.cancel import CancelFlag
from pipelines.frames import require_finite
from pipelines.loading import LoadedPipeline
from pipelines.text import EncodedText

DENSE_STEPS = "dense_steps"


class StepWatch:
    """The pipeline's step callback: timing, finiteness, cancel and the leading dense steps."""

    def __init__(
        self,
        device: torch.device,
        params: JobParameters,
        attention: SwapHandle,
        flag: CancelFlag,
        emit: Callable[[StepFinished], None],
    ) -> None:
        self.seconds: list[float] = []
        self._device = device
        self._total = params.num_inference_steps
        self._dense_steps = params.attention.dense_step_count(self._total)
        self._attention = attention
        self._flag = flag
        self._emit = emit
        self._start = 0.0

    def begin(self) -> None:
        """Set the first step's attention and start the clock."""
        self._choose_attention(1)
        synchronize(self._device)
        self._start = time.perf_counter()

    def __call__(self, pipe: object, index: int, timestep: object, tensors: dict[str, Any]) -> dict[str, Any]:
        """After step ``index`` (from 0); returns that nothing is replaced."""
        synchronize(self._device)
        self.seconds.append(time.perf_counter() - self._start)
        step = index + 1
        require_finite(tensors["latents"], f"latents after step {step} of {self._total}")
        self._emit(StepFinished(step, self._total, self.seconds[-1]))
        self._flag.check()
        self._choose_attention(step + 1)
        self._start = time.perf_counter()
        return {}

    def _choose_attention(self, step: int) -> None:
        self._attention.set_dense(DENSE_STEPS if step <= self._dense_steps else None)


def denoise(
    loaded: LoadedPipeline, params: JobParameters, text: EncodedText, watch: StepWatch
) -> torch.Tensor:
    """Latents [1, C, T, h, w], float32, from the seed's noise.

    The noise is drawn on the CPU, so a seed means the same noise on every device.
    """
    watch.begin()
    latents: torch.Tensor = loaded.pipe(
        prompt_embeds=text.positive,
        negative_prompt_embeds=text.negative,
        width=params.width,
        height=params.height,
        num_frames=params.num_frames,
        num_inference_steps=params.num_inference_steps,
        guidance_scale=params.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(params.seed),
        output_type="latent",
        callback_on_step_end=watch,
        callback_on_step_end_tensor_inputs=["latents"],
    ).frames
    return latents


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_seconds(seconds: list[float]) -> StepSeconds:
    """Median, 95th percentile (nearest rank) and maximum."""
    ordered = sorted(seconds)
    count = len(ordered)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return StepSeconds(median=middle, p95=ordered[-(-count * 95 // 100) - 1], max=ordered[-1])
