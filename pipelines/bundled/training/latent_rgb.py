"""Fits the linear map from the bundled model's latents to colours, for previews.

``python -m pipelines.bundled.training.latent_rgb``: clips are drawn and encoded; least squares maps each
normalised latent to the mean colour of the pixels that it stands for. Writes the table that previews read,
with the PSNR on clips of held-out combinations.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import Tensor

from configs.model_preset import BUNDLED_MODEL, find_model
from pipelines.bundled.drawing import render
from pipelines.bundled.training.clips import normalise
from pipelines.bundled.training.components import SPATIAL_FACTOR, TEMPORAL_FACTOR
from pipelines.bundled.world import ClipSpec, held_out_specs, trained_specs
from pipelines.projections import TABLE_FOLDER, Projection

SIDE, FRAMES, CLIPS = 128, 17, 96
COMMAND = "python -m pipelines.bundled.training.latent_rgb"


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, measure and write; ``argv`` as on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=TABLE_FOLDER / f"{BUNDLED_MODEL}.json")
    arguments = parser.parse_args(argv)
    folder = find_model(BUNDLED_MODEL).folder
    vae = AutoencoderKLWan.from_pretrained(folder, subfolder="vae").eval()
    projection = fit(vae, trained_specs()[:: len(trained_specs()) // CLIPS], held_out_specs()[:CLIPS])
    arguments.output.write_text(projection.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print(f"{arguments.output}: {projection.psnr_decibels} dB")


def fit(vae: AutoencoderKLWan, fitted: Sequence[ClipSpec], measured: Sequence[ClipSpec]) -> Projection:
    """Least squares on clips of ``fitted``; its PSNR on clips of ``measured``."""
    latents, colours = examples(vae, fitted, seed=0)
    ones = torch.ones(len(latents), 1)
    solution = torch.linalg.lstsq(torch.cat([latents, ones], 1).double(), colours.double()).solution
    rounded = [[round(value, 4) for value in row] for row in solution.tolist()]
    projection = Projection(
        vae=BUNDLED_MODEL,
        source=f"Least squares on {len(fitted)} drawn clips: {COMMAND}",
        latents_mean=tuple(vae.config.latents_mean),
        latents_std=tuple(vae.config.latents_std),
        factors=tuple((red, green, blue) for red, green, blue in rounded[:-1]),
        bias=(rounded[-1][0], rounded[-1][1], rounded[-1][2]),
    )
    return projection.model_copy(update={"psnr_decibels": psnr_decibels(vae, projection, measured)})


def psnr_decibels(vae: AutoencoderKLWan, projection: Projection, specs: Sequence[ClipSpec]) -> float:
    """PSNR of the projected colours, whose range is 2."""
    latents, colours = examples(vae, specs, seed=1)
    projected = latents @ torch.tensor(projection.factors) + torch.tensor(projection.bias)
    return round(10 * math.log10(4 / float(F.mse_loss(projected.clamp(-1, 1), colours))), 2)


@torch.no_grad()
def examples(vae: AutoencoderKLWan, specs: Sequence[ClipSpec], seed: int) -> tuple[Tensor, Tensor]:
    """Normalised latents [N, C] of one clip per spec, and the mean colours [N, 3] that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    latents, colours = [], []
    for spec in specs:
        clip = render([spec], generator, height=SIDE, width=SIDE, num_frames=FRAMES)
        encoded = normalise(vae, vae.encode(clip).latent_dist.mode())
        latents.append(encoded[0].flatten(1).T)
        colours.append(latent_colours(clip)[0].flatten(1).T)
    return torch.cat(latents), torch.cat(colours)


def latent_colours(clips: Tensor) -> Tensor:
    """Mean colours [B, 3, T', H', W'] of clips [B, 3, T, H, W]; the first latent frame is one frame."""
    first = F.avg_pool3d(clips[:, :, :1], (1, SPATIAL_FACTOR, SPATIAL_FACTOR))
    rest = F.avg_pool3d(clips[:, :, 1:], (TEMPORAL_FACTOR, SPATIAL_FACTOR, SPATIAL_FACTOR))
    return torch.cat([first, rest], 2)


if __name__ == "__main__":
    main()
