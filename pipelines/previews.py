"""A small picture of what the latents show while a clip is being made.

Knows: latents and the linear map of their VAE. Does not know: jobs, steps or clients. No network runs: a
preview costs a small matrix product and a JPEG.
"""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from pipelines.frames import Frames
from pipelines.projections import Projection

FRAMES = 4  # from first to last side by side: one sees what moves
SIDE = 160  # pixels of the longer side of one frame
MAX_BYTES = 10_000
QUALITIES = (80, 60, 40, 20, 10, 5)  # the first that fits is taken; noise of the first steps compresses badly


def preview_jpeg(latents: torch.Tensor, projection: Projection) -> bytes:
    """A strip of frames of normalised latents [1, C, T, h, w], as a JPEG.

    It has at most MAX_BYTES unless it is fine noise of a large clip.

    Raises:
        ValueError: the projection is for another number of channels.
    """
    cells = [_enlarged(frame) for frame in _coloured(_spread(latents[0]), projection)]
    width, height = cells[0].size
    strip = Image.new("RGB", (len(cells) * width, height))
    for index, cell in enumerate(cells):
        strip.paste(cell, (index * width, 0))
    return _compressed(strip)


def predicted_latents(scheduler: Any, latents: torch.Tensor) -> torch.Tensor:
    """What the scheduler expected of the finished latents in its last step; ``latents`` if it keeps none.

    Multistep schedulers that work on predictions of the clean latents keep the last ones; from the first step
    on they show more than the latents, which are mostly noise then.
    """
    if not scheduler.config.get("predict_x0", False):
        return latents
    predicted = scheduler.model_outputs[-1]
    return latents if predicted is None else predicted


def _spread(latents: torch.Tensor) -> torch.Tensor:
    """At most FRAMES of the latent frames [C, T, h, w], first and last included."""
    count = latents.shape[1]
    chosen = np.linspace(0, count - 1, min(count, FRAMES)).round().astype(int)
    return latents[:, chosen.tolist()]


def _coloured(latents: torch.Tensor, projection: Projection) -> Frames:
    """Latent frames [C, T, h, w] -> pictures [T, h, w, 3]."""
    channels = len(projection.factors)
    if latents.shape[0] != channels:
        raise ValueError(
            f"latents have {latents.shape[0]} channels; the projection for {projection.vae} has {channels}"
        )
    latents = latents.float()
    factors, bias = (latents.new_tensor(values) for values in (projection.factors, projection.bias))
    colours = torch.einsum("cthw,ck->thwk", latents, factors) + bias
    pictures: Frames = ((colours + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).cpu().numpy()
    return pictures


def _enlarged(frame: Frames) -> Image.Image:
    picture = Image.fromarray(frame)
    scale = SIDE / max(picture.size)
    return picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))))


def _compressed(picture: Image.Image) -> bytes:
    for quality in QUALITIES:
        data = io.BytesIO()
        picture.save(data, "JPEG", quality=quality)
        if data.tell() <= MAX_BYTES:
            break
    return data.getvalue()
