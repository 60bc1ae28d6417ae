"""The bundled model's table of colours is the one its VAE gives."""

import pytest
import torch
from diffusers import AutoencoderKLWan

from configs.model_preset import BUNDLED_MODEL, find_model
from pipelines.bundled.training.latent_rgb import fit, latent_colours, psnr_decibels
from pipelines.bundled.world import held_out_specs, trained_specs
from pipelines.projections import find_projection


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    """The bundled VAE alone."""
    folder = find_model(BUNDLED_MODEL).folder
    return AutoencoderKLWan.from_pretrained(folder, subfolder="vae").eval()


def test_latent_frames_stand_for_one_then_four_frames() -> None:
    clip = torch.arange(9.0).view(1, 1, 9, 1, 1).expand(1, 3, 9, 16, 8)
    colours = latent_colours(clip)
    assert colours.shape == (1, 3, 3, 2, 1)
    assert colours[0, 0, :, 0, 0].tolist() == [0.0, 2.5, 6.5]


def test_the_table_is_the_one_of_this_vae(vae: AutoencoderKLWan) -> None:
    table = find_projection(tuple(vae.config.latents_mean), tuple(vae.config.latents_std))
    assert table is not None
    other = table.model_copy(update={"factors": table.factors[::-1]})
    specs = held_out_specs()[:2]
    assert psnr_decibels(vae, table, specs) > 18
    assert psnr_decibels(vae, other, specs) < 12


def test_a_fit_is_good_on_what_it_has_not_seen(vae: AutoencoderKLWan) -> None:
    fitted = fit(vae, trained_specs()[::250], held_out_specs()[:1])
    assert len(fitted.factors) == vae.config.z_dim
    assert fitted.psnr_decibels is not None
    assert fitted.psnr_decibels > 18
