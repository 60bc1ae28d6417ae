"""The denoise stage: noise and embeddings to latents, one event a step.

Knows: the pipeline's own sampling loop and its step callback. Does not know: text, pictures, files.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from attention import SwapHandle
from configs.job import JobParameters, StepFinished, StepSeconds
from pipelines.cancel import CancelFlag
from pipelines.checkpoint import Checkpoint
from pipelines.frames import require_finite
from pipelines.loading import LoadedPipeline
from pipelines.sampler import continued
from pipelines.text import EncodedText

DENSE_STEPS = "dense_steps"
# Called between two steps, outside their timing, with the number of steps done and the latents.
BetweenSteps = Callable[[int, torch.Tensor], None]


class StepWatch:
    """The pipeline's step callback: timing, finiteness, cancel and the leading dense steps."""

    def __init__(
        self,
        device: torch.device,
        params: JobParameters,
        attention: SwapHandle,
        flag: CancelFlag,
        emit: Callable[[StepFinished], None],
        between_steps: BetweenSteps = lambda step, latents: None,
        agreed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.seconds: list[float] = []
        self.step = 0
        self._device = device
        self._total = params.num_inference_steps
        self._dense_steps = params.attention.dense_step_count(self._total)
        self._attention = attention
        self._flag = flag
        self._emit = emit
        self._between_steps = between_steps
        self._agreed = agreed
        self._start = 0.0

    def begin(self, steps_done: int = 0) -> None:
        """Set the next step's attention and start the clock."""
        self.step = steps_done
        self._choose_attention(steps_done + 1)
        synchronize(self._device)
        self._start = time.perf_counter()

    def __call__(self, pipe: object, index: int, timestep: object, tensors: dict[str, Any]) -> dict[str, Any]:
        """After a step of the pipeline's loop; returns that nothing is replaced."""
        synchronize(self._device)
        self.seconds.append(time.perf_counter() - self._start)
        self.step += 1
        latents = tensors["latents"]
        with self._agreed():  # where there are other ranks, all go on or none
            require_finite(latents, f"latents after step {self.step} of {self._total}")
            self._emit(StepFinished(self.step, self._total, self.seconds[-1]))
            self._flag.check()
            if self.step < self._total:
                self._between_steps(self.step, latents)
        self._choose_attention(self.step + 1)
        synchronize(self._device)
        self._start = time.perf_counter()
        return {}

    def _choose_attention(self, step: int) -> None:
        self._attention.set_step(step - 1)
        self._attention.set_dense(DENSE_STEPS if step <= self._dense_steps else None)


def denoise(
    loaded: LoadedPipeline,
    params: JobParameters,
    text: EncodedText,
    watch: StepWatch,
    resume: Checkpoint | None = None,
) -> torch.Tensor:
    """Latents [1, C, T, h, w], float32, from the seed's noise or from a checkpoint with steps left.

    The noise is drawn on the CPU, so a seed means the same noise on every device.
    """
    rest = contextlib.nullcontext() if resume is None else continued(loaded.pipe, resume.step, resume.sampler)
    with rest:
        watch.begin(resume.step if resume else 0)
        latents: torch.Tensor = loaded.pipe(
            prompt_embeds=text.positive,
            negative_prompt_embeds=text.negative,
            width=params.width,
            height=params.height,
            num_frames=params.num_frames,
            num_inference_steps=params.num_inference_steps,
            guidance_scale=params.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(params.seed),
            latents=resume.latents if resume else None,
            output_type="latent",
            callback_on_step_end=watch,
            callback_on_step_end_tensor_inputs=["latents"],
        ).frames
    if watch.step != params.num_inference_steps:
        raise RuntimeError(f"the pipeline made {watch.step} steps instead of {params.num_inference_steps}")
    return latents


def synchronize(device: torch.device) -> None:
    """Wait for the device's queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_seconds(seconds: list[float]) -> StepSeconds | None:
    """Median, 95th percentile (nearest rank) and maximum; None if no step was run."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    count = len(ordered)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return StepSeconds(median=middle, p95=ordered[-(-count * 95 // 100) - 1], max=ordered[-1])
