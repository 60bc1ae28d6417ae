"""Previews: what they show of a real run, their size, and what they refuse."""

import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from numpy.typing import NDArray
from PIL import Image

from configs.model_preset import BUNDLED_MODEL, find_model
from pipelines import load_pipeline
from pipelines.bundled.read_back import read_attributes
from pipelines.previewing import shipped_projection
from pipelines.previews import FRAMES, MAX_BYTES, SIDE, predicted_latents, preview_jpeg
from pipelines.projections import Projection, known_projections

PROMPT = "a red circle moving left quickly on a white background"
IDENTITY = Projection(
    vae="colours",
    source="test",
    latents_mean=(0, 0, 0),
    latents_std=(1, 1, 1),
    factors=((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    bias=(0, 0, 0),
)


def _frames(jpeg: bytes, count: int) -> NDArray[np.uint8]:
    """The pictures of a strip, [count, h, w, 3]."""
    with Image.open(io.BytesIO(jpeg)) as strip:
        assert (strip.format, strip.mode) == ("JPEG", "RGB")
        return np.stack(np.split(np.asarray(strip), count, axis=1))


def _ramp(count: int, height: int = 8, width: int = 8) -> torch.Tensor:
    """Latents [1, 3, count, h, w] whose frame i is grey, from black to white."""
    return torch.linspace(-1, 1, count).view(1, 1, count, 1, 1).expand(1, 3, count, height, width)


@pytest.mark.parametrize(
    ("count", "levels"), [(1, [0]), (3, [0, 128, 255]), (4, [0, 85, 170, 255]), (21, [0, 89, 166, 255])]
)
def test_frames_are_spread_from_first_to_last(count: int, levels: list[int]) -> None:
    shown = _frames(preview_jpeg(_ramp(count), IDENTITY), len(levels))
    assert np.abs(shown.astype(int) - np.reshape(levels, (-1, 1, 1, 1))).max() <= 2


@pytest.mark.parametrize(
    ("height", "width", "wanted"),
    [(8, 8, (160, 160)), (60, 104, (92, 160)), (160, 90, (160, 90)), (1, 500, (1, 160))],
)
def test_the_longer_side_is_the_same_for_every_clip(height: int, width: int, wanted: tuple[int, int]) -> None:
    assert _frames(preview_jpeg(_ramp(5, height, width), IDENTITY), FRAMES).shape[1:3] == wanted


def test_each_channel_has_its_colour_and_what_is_beyond_the_range_is_cut() -> None:
    latents = torch.tensor([9.0, -9.0, 0.0]).view(1, 3, 1, 1, 1).expand(1, 3, 1, 8, 8)
    biased = IDENTITY.model_copy(update={"bias": (0.0, 0.0, 0.5)})
    shown = _frames(preview_jpeg(latents, biased), 1)
    assert np.abs(shown.astype(int) - (255, 0, 191)).max() <= 3


def test_half_precision_latents_will_do() -> None:
    assert preview_jpeg(_ramp(3).to(torch.bfloat16), IDENTITY) == preview_jpeg(_ramp(3), IDENTITY)


def test_pictures_are_small_and_those_of_noise_too() -> None:
    (table,) = known_projections()
    noise = torch.randn(1, 16, 21, 60, 104, generator=torch.Generator().manual_seed(0))
    blurred = torch.nn.functional.interpolate(noise[..., ::8, ::8], (21, 60, 104))
    assert len(preview_jpeg(blurred, table)) <= MAX_BYTES
    assert len(preview_jpeg(noise, table)) <= MAX_BYTES


def test_a_projection_for_other_latents_is_refused() -> None:
    with pytest.raises(ValueError, match="latents have 4 channels; the projection for colours has 3"):
        preview_jpeg(torch.zeros(1, 4, 1, 8, 8), IDENTITY)


@dataclass
class _Watch:
    """The pipeline's step callback: keeps what each step shows."""

    projection: Projection
    previews: list[NDArray[np.uint8]] = field(default_factory=list)
    noisy: list[NDArray[np.uint8]] = field(default_factory=list)
    shown: torch.Tensor | None = None

    def __call__(self, pipe: Any, index: int, time: object, tensors: dict[str, Any]) -> dict[str, Any]:
        self.shown = predicted_latents(pipe.scheduler, tensors["latents"])
        self.previews.append(_frames(preview_jpeg(self.shown, self.projection), FRAMES))
        self.noisy.append(_frames(preview_jpeg(tensors["latents"], self.projection), FRAMES))
        return {}


@pytest.fixture(scope="module")
def run() -> tuple[_Watch, torch.Tensor]:
    """Six steps of the bundled model, and its last latents."""
    loaded = load_pipeline(find_model(BUNDLED_MODEL), device="cpu", dtype="float32")
    projection = shipped_projection(loaded)
    assert projection is not None
    watch = _Watch(projection)
    with torch.no_grad():
        latents = loaded.pipe(
            prompt=PROMPT,
            width=96,
            height=96,
            num_frames=17,
            num_inference_steps=6,
            guidance_scale=1.0,
            max_sequence_length=32,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            callback_on_step_end=watch,
        ).frames
    return watch, latents


def _shows_the_prompt(preview: NDArray[np.uint8]) -> bool:
    seen = read_attributes(preview)
    return (seen.color, seen.direction, seen.background) == ("red", "left", "white")


def test_a_run_of_the_bundled_model_is_seen_long_before_its_end(run: tuple[_Watch, torch.Tensor]) -> None:
    watch, _ = run
    assert len(watch.previews) == 6
    assert all(_shows_the_prompt(preview) for preview in watch.previews[1:])


def test_the_latents_themselves_would_show_it_only_late(run: tuple[_Watch, torch.Tensor]) -> None:
    """Why predictions are shown."""
    watch, _ = run
    assert not any(_shows_the_prompt(noisy) for noisy in watch.noisy[:3])


def test_after_the_last_step_the_prediction_is_the_result(run: tuple[_Watch, torch.Tensor]) -> None:
    watch, latents = run
    assert watch.shown is not None
    torch.testing.assert_close(watch.shown, latents)


def test_schedulers_without_predictions_show_the_latents() -> None:
    latents = torch.zeros(1, 3, 1, 8, 8)
    fresh = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    for scheduler in (FlowMatchEulerDiscreteScheduler(), fresh):
        assert predicted_latents(scheduler, latents) is latents


def test_the_side_is_in_the_strip() -> None:
    with Image.open(io.BytesIO(preview_jpeg(_ramp(9), IDENTITY))) as strip:
        assert strip.size == (FRAMES * SIDE, SIDE)
