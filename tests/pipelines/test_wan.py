"""Wan's own parts: geometry, fit of the components, decode."""

from types import SimpleNamespace

import pytest
import torch

from configs.geometry import VideoGeometry
from configs.job import JobParameters
from configs.model_preset import find_model, preset_names
from pipelines import LoadedPipeline, wan
from tests.pipelines.stock import stock_output


def _pipe(*, in_channels: int = 48, text_dim: int = 4096) -> SimpleNamespace:
    """The configuration of Wan2.2-TI2V-5B, whose VAE patches pixels before its layers."""
    return SimpleNamespace(
        vae_scale_factor_spatial=16,
        vae_scale_factor_temporal=4,
        vae=SimpleNamespace(
            config=SimpleNamespace(
                z_dim=48, dim_mult=[1, 2, 4, 4], patch_size=2, temperal_downsample=[False, True, True]
            )
        ),
        text_encoder=SimpleNamespace(config=SimpleNamespace(d_model=4096)),
        transformer=SimpleNamespace(
            config=SimpleNamespace(patch_size=[1, 2, 2], in_channels=in_channels, text_dim=text_dim)
        ),
        transformer_2=None,
    )


def test_geometry_of_a_vae_with_pixel_patches() -> None:
    expected = VideoGeometry(vae_spatial=16, vae_temporal=4, patch=(1, 2, 2))
    assert wan.geometries(_pipe()) == {"the pipeline": expected, "the VAE's layers": expected}


def test_geometry_comes_from_the_layers_too() -> None:
    pipe = _pipe()
    pipe.vae.config.temperal_downsample = [False, False, True]
    assert wan.geometries(pipe)["the VAE's layers"].vae_temporal == 2
    assert wan.geometries(pipe)["the pipeline"].vae_temporal == 4


def test_parts_that_fit_are_no_mismatch(loaded: LoadedPipeline) -> None:
    assert wan.mismatch(_pipe()) is None
    assert wan.mismatch(loaded.pipe) is None


def test_image_to_video_channels_are_a_mismatch() -> None:
    assert wan.mismatch(_pipe(in_channels=36)) == (
        "the transformer takes 36 latent channels and the VAE makes 48 (image-to-video models are not served)"
    )


def test_text_width_mismatch() -> None:
    assert wan.mismatch(_pipe(text_dim=512)) == (
        "the transformer takes text of width 512 and the text encoder makes 4096"
    )


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [("  a\n red\tcircle ", "a red circle"), ("salt &amp; pepper", "salt & pepper"), ("cafeÌ\x81", "café")],
)
def test_clean_prompt(text: str, cleaned: str) -> None:
    assert wan.clean_prompt(text) == cleaned


def test_decode_equals_the_stock_pipeline(loaded: LoadedPipeline, params: JobParameters) -> None:
    latents = stock_output(loaded, params, "latent")
    with torch.no_grad():
        pictures = wan.decode_latents(loaded.pipe, latents)
    stock = torch.from_numpy(stock_output(loaded, params, "np")[0]).permute(0, 3, 1, 2)
    assert pictures.shape == (params.num_frames, 3, params.height, params.width)
    torch.testing.assert_close(pictures, stock, rtol=0, atol=0)


def test_forget_drops_the_frames_of_an_interrupted_decode(own_pipeline: LoadedPipeline) -> None:
    vae = own_pipeline.pipe.vae
    vae.clear_cache()
    with torch.no_grad():
        vae.decoder(torch.zeros(1, 4, 1, 8, 8), feat_cache=vae._feat_map, feat_idx=[0], first_chunk=True)
    assert any(frame is not None for frame in vae._feat_map)
    wan.forget(own_pipeline.pipe)
    assert all(frame is None for frame in vae._feat_map)


@pytest.mark.parametrize(
    "geometry",
    [
        *(find_model(name).geometry for name in preset_names()),
        VideoGeometry(vae_spatial=16, patch=(1, 2, 2)),
        VideoGeometry(vae_spatial=8, patch=(1, 3, 3)),
    ],
    ids=str,
)
def test_the_pipeline_takes_every_side_that_passes(loaded: LoadedPipeline, geometry: VideoGeometry) -> None:
    step = geometry.side_multiple
    assert step % (geometry.vae_spatial * geometry.patch[1]) == 0
    for pixels in range(step, 10 * step, step):
        geometry.check_side("width", pixels)
        loaded.pipe.check_inputs("x", None, pixels, pixels)
