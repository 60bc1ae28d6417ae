"""What is particular to Wan pipelines: prompts to embeddings, latents to pictures, geometry.

Knows: ``WanPipeline`` of diffusers 0.42 and its parts. Does not know: jobs, devices, files. The decode
repeats the tail of ``WanPipeline.__call__``; a test holds the two equal.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from configs.geometry import VideoGeometry
from pipelines.tile import Tile

TILING = (
    "use_tiling",
    "tile_sample_min_height",
    "tile_sample_min_width",
    "tile_sample_stride_height",
    "tile_sample_stride_width",
)


def geometries(pipe: Any) -> dict[str, VideoGeometry]:
    """Compression and patch size: as the pipeline uses them, and as the VAE's layers make them."""
    patch = tuple(_transformers(pipe)[0].config.patch_size)
    vae = pipe.vae.config
    return {
        "the pipeline": VideoGeometry(
            vae_spatial=pipe.vae_scale_factor_spatial,
            vae_temporal=pipe.vae_scale_factor_temporal,
            patch=patch,
        ),
        "the VAE's layers": VideoGeometry(
            vae_spatial=2 ** (len(vae.dim_mult) - 1) * (vae.patch_size or 1),
            vae_temporal=2 ** sum(vae.temperal_downsample),
            patch=patch,
        ),
    }


def mismatch(pipe: Any) -> str | None:
    """Say which components do not fit each other, or None."""
    for transformer in _transformers(pipe):
        config, channels = transformer.config, pipe.vae.config.z_dim
        if config.in_channels != channels:
            return (
                f"the transformer takes {config.in_channels} latent channels and the VAE makes {channels} "
                "(image-to-video models are not served)"
            )
        if config.text_dim != pipe.text_encoder.config.d_model:
            return (
                f"the transformer takes text of width {config.text_dim} and the text encoder makes "
                f"{pipe.text_encoder.config.d_model}"
            )
    return None


def clean_prompt(text: str) -> str:
    """The text that the tokenizer will see: repaired, unescaped, white space squeezed."""
    return str(prompt_clean(text))


def encode_texts(pipe: Any, texts: Sequence[str], tokens: int) -> torch.Tensor:
    """Embeddings [texts, tokens, text_dim], from one pass."""
    embeddings, _ = pipe.encode_prompt(
        prompt=list(texts), do_classifier_free_guidance=False, max_sequence_length=tokens
    )
    assert isinstance(embeddings, torch.Tensor)
    return embeddings


def decode_latents(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents [1, z_dim, T, h, w] -> pictures [F, 3, H, W] in 0 to 1, in the VAE's dtype."""
    video = pipe.vae.decode(_unscaled(pipe.vae, latents), return_dict=False)[0]
    return _pictures(pipe, video)


def decoded_parts(pipe: Any, latents: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same pictures in parts [f, 3, H, W], as they are decoded; in tiles there is one part.

    Repeats ``AutoencoderKLWan._decode``, which keeps all frames of the clip on the device.
    """
    vae, latents = pipe.vae, _unscaled(pipe.vae, latents)
    if vae.use_tiling:
        yield _pictures(pipe, vae.decode(latents, return_dict=False)[0])
        return
    vae.clear_cache()
    hidden = vae.post_quant_conv(latents)
    for frame in range(hidden.shape[2]):
        vae._conv_idx = [0]
        part = vae.decoder(
            hidden[:, :, frame : frame + 1],
            feat_cache=vae._feat_map,
            feat_idx=vae._conv_idx,
            first_chunk=frame == 0,
        )
        if vae.config.patch_size is not None:
            part = unpatchify(part, patch_size=vae.config.patch_size)
        yield _pictures(pipe, part.clamp(-1.0, 1.0))
    vae.clear_cache()


def _unscaled(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """What the VAE decodes, on its device and in its number format."""
    latents = latents.to(vae.device, vae.dtype)
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents)
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents)
    return latents / inverse_std + mean


def _pictures(pipe: Any, video: torch.Tensor) -> torch.Tensor:
    pictures: torch.Tensor = pipe.video_processor.postprocess_video(video, output_type="pt")[0]
    return pictures


@contextlib.contextmanager
def tiled(pipe: Any, tile: Tile | None) -> Iterator[None]:
    """Within the block, the VAE decodes tiles of that size, each through all frames; None: whole pictures."""
    vae = pipe.vae
    before = {name: getattr(vae, name) for name in TILING}
    try:
        if tile is None:
            vae.disable_tiling()
        else:
            vae.enable_tiling(tile.side, tile.side, tile.stride, tile.stride)
        yield
    finally:
        for name, value in before.items():
            setattr(vae, name, value)


def forget(pipe: Any) -> None:
    """Drop what an interrupted job leaves: the VAE's cache of past frames, and the current timestep."""
    pipe.vae.clear_cache()
    pipe._current_timestep = None


def _transformers(pipe: Any) -> list[Any]:
    return [part for part in (pipe.transformer, pipe.transformer_2) if part is not None]
