"""Maps from latents to colours, learned from decoded clips."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from numpy.typing import NDArray

from configs.job import JobParameters, JobPaths
from configs.model_preset import BUNDLED_MODEL, find_model
from pipelines import LoadedPipeline, run_job
from pipelines.bundled.drawing import render
from pipelines.bundled.training import latent_rgb as training
from pipelines.bundled.training.clips import normalise
from pipelines.bundled.world import held_out_specs, trained_specs
from pipelines.colour_learning import CLIPS, ColourLearner, examples
from pipelines.convolution import convolved_by_onednn
from pipelines.frames import Frames, Leaving
from pipelines.projections import Projection, find_projection

FACTORS = torch.tensor([[0.2, -0.1, 0.0], [0.0, 0.2, 0.1], [0.1, 0.0, -0.2]], dtype=torch.float64)
BIAS = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)


def _learn(learner: ColourLearner, latents: torch.Tensor, frames: Frames) -> None:
    mean, std = (0.0,) * latents.shape[1], (1.0,) * latents.shape[1]
    learner.learn(latents, frames, vae_temporal=4, latents_mean=mean, latents_std=std)


def _linear_clip(seed: int) -> tuple[torch.Tensor, Frames]:
    """Latents [1, 3, 4, 12, 10], and 13 frames of 40x48 whose colours they are by FACTORS and BIAS."""
    latents = torch.randn(1, 3, 4, 12, 10, generator=torch.Generator().manual_seed(seed))
    colours = torch.einsum("cthw,ck->thwk", latents[0].double(), FACTORS) + BIAS
    pixels = colours.repeat_interleave(4, 1).repeat_interleave(4, 2).repeat_interleave(4, 0)[3:]
    return latents, ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).numpy()


def _differences(projection: Projection | None) -> float:
    assert projection is not None
    found = torch.tensor([*projection.factors, projection.bias], dtype=torch.float64)
    return float((found - torch.cat([FACTORS, BIAS[None]])).abs().max())


def test_a_latent_stands_for_the_mean_of_its_pixels_in_space_and_time() -> None:
    latents = torch.arange(12.0).view(1, 1, 3, 2, 2)
    frames = np.random.default_rng(0).integers(0, 256, (9, 16, 8, 3), dtype=np.uint8)
    inputs, colours = examples(latents, frames, 4)
    assert sorted(inputs[:, 0]) == list(range(12))
    assert (inputs[:, 1] == 1).all()
    for (latent, _), colour in zip(inputs, colours, strict=True):
        t, y, x = np.unravel_index(int(latent), (3, 2, 2))
        times = slice(0, 1) if t == 0 else slice(4 * t - 3, 4 * t + 1)
        pixels = frames[times, 8 * y : 8 * y + 8, 4 * x : 4 * x + 4]
        np.testing.assert_allclose(colour, pixels.mean((0, 1, 2)) / 127.5 - 1)


def test_of_large_clips_some_points_of_all_frames_are_taken() -> None:
    latents = torch.arange(5 * 40 * 40.0).view(1, 1, 5, 40, 40)
    inputs, _ = examples(latents, np.zeros((17, 40, 40, 3), np.uint8), 4)
    assert len({*inputs[:, 0]}) == len(inputs) == 4096
    assert {int(latent) // 1600 for latent in inputs[:, 0]} == {0, 1, 2, 3, 4}


def test_one_frame_will_do() -> None:
    inputs, colours = examples(torch.zeros(1, 2, 1, 2, 2), np.full((1, 8, 8, 3), 255, np.uint8), 4)
    assert inputs.tolist() == [[0, 0, 1]] * 4
    assert colours.tolist() == [[1, 1, 1]] * 4


def test_a_linear_decoder_is_found() -> None:
    learner = ColourLearner()
    assert learner.projection is None
    _learn(learner, *_linear_clip(0))
    # Half a level of 255 is 0.004; the ridge takes a thousandth of the factors.
    assert _differences(learner.projection) < 0.004


def test_half_precision_latents_will_do() -> None:
    latents, frames = _linear_clip(0)
    learner = ColourLearner()
    _learn(learner, latents.to(torch.bfloat16), frames)
    assert _differences(learner.projection) < 0.004


def test_directions_that_did_not_vary_get_no_factors() -> None:
    latents, _ = _linear_clip(0)
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(1))
    latents = torch.cat([latents[:, :1].expand(-1, 2, -1, -1, -1), 1e-3 * noise[:, :1]], 1)
    frames = np.random.default_rng(0).integers(0, 256, (13, 48, 40, 3), dtype=np.uint8)
    learner = ColourLearner()
    _learn(learner, latents, frames)
    assert learner.projection is not None
    assert np.abs(learner.projection.factors).max() < 0.05


@pytest.mark.parametrize("shape", [(12, 48, 40, 3), (13, 47, 40, 3), (13, 48, 41, 3), (1, 48, 40, 3)])
def test_other_frames_are_refused(shape: tuple[int, ...]) -> None:
    latents, _ = _linear_clip(0)
    with pytest.raises(ValueError, match=r"frames of \d+x\d+ are no [14] for each latent of"):
        _learn(ColourLearner(), latents, np.zeros(shape, np.uint8))


def test_so_many_clips_are_enough() -> None:
    learner = ColourLearner()
    for seed in range(CLIPS):
        assert not learner.is_done
        _learn(learner, *_linear_clip(seed))
    last = learner.projection
    _learn(learner, *_linear_clip(CLIPS))
    assert learner.is_done
    assert learner.projection is last


def test_many_threads_teach_as_one_does() -> None:
    clips = [_linear_clip(seed) for seed in range(CLIPS + 4)]
    learner, alone = ColourLearner(), ColourLearner()
    with ThreadPoolExecutor(len(clips)) as pool:
        list(pool.map(lambda clip: _learn(learner, *clip), [clips[0]] * len(clips)))
    for _ in clips:
        _learn(alone, *clips[0])
    assert learner.projection is not None
    assert alone.projection is not None
    assert learner.projection.source == alone.projection.source
    np.testing.assert_allclose(learner.projection.factors, alone.projection.factors)


@dataclass
class _Recorder(ColourLearner):
    """Keeps what it learns from."""

    clips: list[tuple[torch.Tensor, Frames]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def learn(self, latents: torch.Tensor, frames: NDArray[np.uint8], **known: object) -> None:
        self.clips.append((latents, frames))
        super().learn(latents, frames, **known)  # type: ignore[arg-type]


@torch.no_grad()
def test_a_job_teaches_its_last_latents_and_what_they_were_decoded_to(
    own_pipeline: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    """What a VAE of random weights makes is not linear in its latents, so nothing is asked of the map."""
    recorder = _Recorder()
    recording = replace(own_pipeline, colours=recorder)
    paths = JobPaths(tmp_path / "clip.mp4")
    for _ in range(CLIPS + 1):
        list(run_job(recording, params, paths, is_cancelled=lambda: False, preview_seconds=1.0))
    assert len(recorder.clips) == CLIPS
    latents, frames = recorder.clips[0]
    assert latents.shape == (1, 4, 3, 8, 8)
    with convolved_by_onednn(own_pipeline.device):
        pictures = own_pipeline.family.decode_latents(own_pipeline.pipe, latents)
    assert np.array_equal(Leaving(pictures).frames(), frames)
    assert recorder.projection is not None
    assert recorder.projection.latents_mean == (0.1, -0.2, 0.3, -0.4)
    assert recorder.projection.latents_std == (1.5, 1.2, 0.9, 1.1)


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    """The bundled VAE alone."""
    return AutoencoderKLWan.from_pretrained(find_model(BUNDLED_MODEL).folder, subfolder="vae").eval()


@torch.no_grad()
def _decoded(vae: AutoencoderKLWan, count: int) -> Iterator[tuple[torch.Tensor, Frames]]:
    """Latents of drawn clips of many kinds, and what the VAE makes of them."""
    generator = torch.Generator().manual_seed(3)
    mean, std = (
        torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std)
    )
    specs = trained_specs()
    for spec in specs[:: len(specs) // count][:count]:
        clip = render([spec], generator, height=64, width=64, num_frames=9)
        latents = normalise(vae, vae.encode(clip).latent_dist.mode())
        video = vae.decode(latents * std + mean)[0][0].clamp(-1, 1)
        yield latents, ((video + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()


def test_eight_clips_teach_nearly_what_the_shipped_table_knows(vae: AutoencoderKLWan) -> None:
    mean, std = tuple(vae.config.latents_mean), tuple(vae.config.latents_std)
    table = find_projection(mean, std)
    learner = ColourLearner()
    for latents, frames in _decoded(vae, CLIPS):
        learner.learn(latents, frames, vae_temporal=4, latents_mean=mean, latents_std=std)
    assert table is not None
    assert learner.projection is not None
    latents, colours = training.examples(vae, held_out_specs()[:4], seed=1)

    def psnr_decibels(projection: Projection) -> float:
        shown = latents @ torch.tensor(projection.factors) + torch.tensor(projection.bias)
        return 10 * math.log10(4 / float((shown.clamp(-1, 1) - colours).square().mean()))

    known, learned = (psnr_decibels(each) for each in (table, learner.projection))
    assert known > 20
    assert learned > known - 1
