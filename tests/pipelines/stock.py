"""What Diffusers' own WanPipeline makes of a job: the truth that our running is held to."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from configs.job import JobParameters
from pipelines import LoadedPipeline
from pipelines.convolution import convolved_by_onednn


def stock_output(loaded: LoadedPipeline, params: JobParameters, output_type: str) -> Any:
    """``pipe(...)`` called as its documentation says; ``output_type`` is ``latent`` or ``np``."""
    return loaded.pipe(
        prompt=params.prompt,
        negative_prompt=params.negative_prompt,
        width=params.width,
        height=params.height,
        num_frames=params.num_frames,
        num_inference_steps=params.num_inference_steps,
        guidance_scale=params.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(params.seed),
        max_sequence_length=loaded.preset.max_sequence_length,
        output_type=output_type,
    ).frames


def stock_frames(loaded: LoadedPipeline, params: JobParameters) -> NDArray[np.uint8]:
    """Frames [F, H, W, 3] of the whole stock call, rounded to bytes.

    The VAE's convolutions run where a job's do: elsewhere their sums are rounded otherwise.
    """
    vae = loaded.pipe.vae
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vae, "decode", _by_onednn(vae.decode, loaded.device))
        frames = stock_output(loaded, params, "np")[0]
    rounded: NDArray[np.uint8] = np.rint(frames * 255).astype(np.uint8)
    return rounded


def _by_onednn(decode: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with convolved_by_onednn(device):
            return decode(*args, **kwargs)

    return call
