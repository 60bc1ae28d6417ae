"""Tiny transformers with random weights, one for each family and variant, and inputs for them.

Knows: how Diffusers calls each class, and where text lies in its self-attention. Does not know: swaps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    MochiTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from torch import Tensor

Grid = tuple[int, int, int]
GRID: Grid = (3, 5, 7)  # no side a multiple of another or of a tile's
BATCH = 2  # classifier-free guidance
TEXT = 6
LATENT = 4  # channels
# As the pipelines make them: a mask of four channels and the latents of an image; the latents of what is kept
# and of what is not, with a mask of 8 x 8; the latents of an image and a mask.
IMAGE_TO_VIDEO_CHANNELS = LATENT + 4 + LATENT
VACE_CHANNELS = 2 * LATENT + 8 * 8
HUNYUAN15_CHANNELS = LATENT + LATENT + 1
HEADS, HEAD_DIM = 2, 16
WIDTH = HEADS * HEAD_DIM


@dataclass(frozen=True)
class Variant:
    """One transformer.

    Attributes:
        build: with random weights, from the global random state.
        arguments: of one forward pass, for a grid and a generator.
        layers: self-attention modules.
        text: "first" or "last" in stock self-attention, None if it is not there.
        valid: text tokens of each batch entry that are no padding.
        total: text tokens with padding, as stock self-attention has them.
        drops_padding: stock self-attention has no padding at all (and goes entry by entry).
    """

    name: str
    build: Callable[[], Any]
    arguments: Callable[[Grid, torch.Generator], dict[str, Any]]
    layers: int
    text: str | None = None
    valid: tuple[int, ...] = field(default=(0, 0))
    total: int = 0
    drops_padding: bool = False


def tokens(grid: Grid) -> int:
    return grid[0] * grid[1] * grid[2]


def _noise(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _timestep() -> Tensor:
    return torch.tensor([700.0] * BATCH)


def _mask(*lengths: int, width: int = TEXT) -> Tensor:
    return torch.stack([torch.arange(width) < length for length in lengths]).long()


def _wan(cls: type = WanTransformer3DModel, in_channels: int = LATENT, **more: Any) -> Callable[[], Any]:
    return lambda: cls(
        patch_size=(1, 2, 2),
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=in_channels,
        out_channels=LATENT,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        **more,
    )


def _wan_arguments(
    grid: Grid, generator: torch.Generator, text: int = TEXT, channels: int = LATENT
) -> dict[str, Any]:
    return {
        "hidden_states": _noise(generator, BATCH, channels, grid[0], 2 * grid[1], 2 * grid[2]),
        "timestep": _timestep(),
        "encoder_hidden_states": _noise(generator, BATCH, text, 16),
    }


def _wan_ti2v_arguments(grid: Grid, generator: torch.Generator) -> dict[str, Any]:
    per_token = 1000 * torch.rand(BATCH, tokens(grid), generator=generator)
    return _wan_arguments(grid, generator) | {"timestep": per_token}


def _wan_i2v_arguments(grid: Grid, generator: torch.Generator) -> dict[str, Any]:
    # The layers take the last 512 tokens for text, whatever the model.
    return _wan_arguments(grid, generator, text=512, channels=IMAGE_TO_VIDEO_CHANNELS) | {
        "encoder_hidden_states_image": _noise(generator, BATCH, 4, 8)
    }


def _vace_arguments(grid: Grid, generator: torch.Generator) -> dict[str, Any]:
    control = _noise(
        generator, BATCH, VACE_CHANNELS, max(grid[0] - 1, 1), 2 * grid[1], 2 * grid[2]
    )  # padded by the model
    return _wan_arguments(grid, generator) | {"control_hidden_states": control}


def _forcing_arguments(grid: Grid, generator: torch.Generator) -> dict[str, Any]:
    per_frame = 1000 * torch.rand(BATCH, grid[0], generator=generator)
    return _wan_arguments(grid, generator) | {"timestep": per_frame, "enable_diffusion_forcing": True}


def _hunyuan(**more: Any) -> Callable[[], Any]:
    return lambda: HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=1.0,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
        **more,
    )


def _hunyuan_arguments(grid: Grid, generator: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _noise(generator, BATCH, 4, grid[0], 2 * grid[1], 2 * grid[2]),
        "timestep": _timestep(),
        "encoder_hidden_states": _noise(generator, BATCH, TEXT, 16),
        "encoder_attention_mask": _mask(4, 2),
        "pooled_projections": _noise(generator, BATCH, 8),
        "guidance": torch.tensor([6000.0] * BATCH),
    }


def _hunyuan15() -> Any:
    return HunyuanVideo15Transformer3DModel(
        in_channels=HUNYUAN15_CHANNELS,
        out_channels=LATENT,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=1.0,
        text_embed_dim=16,
        text_embed_2_dim=8,
        image_embed_dim=8,
        rope_axes_dim=(4, 6, 6),
    )


def _hunyuan15_arguments(image: bool) -> Callable[[Grid, torch.Generator], dict[str, Any]]:
    return lambda grid, generator: {
        "hidden_states": _noise(generator, BATCH, HUNYUAN15_CHANNELS, *grid),
        "timestep": _timestep(),
        "encoder_hidden_states": _noise(generator, BATCH, TEXT, 16),
        "encoder_attention_mask": _mask(4, 2),
        "encoder_hidden_states_2": _noise(generator, BATCH, 3, 8),
        "encoder_attention_mask_2": _mask(2, 1, width=3),
        "image_embeds": _noise(generator, BATCH, 2, 8) * image,
    }


def _cog(**more: Any) -> Callable[[], Any]:
    return lambda: CogVideoXTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=16,
        num_layers=2,
        sample_width=14,
        sample_height=10,
        sample_frames=9,
        max_text_seq_length=TEXT,
        **more,
    )


def _cog_arguments(patch_time: int = 1) -> Callable[[Grid, torch.Generator], dict[str, Any]]:
    return lambda grid, generator: {
        "hidden_states": _noise(generator, BATCH, patch_time * grid[0], 4, 2 * grid[1], 2 * grid[2]),
        "timestep": _timestep(),
        "encoder_hidden_states": _noise(generator, BATCH, TEXT, 16),
    }


def _cog_rotary_arguments(patch_time: int = 1) -> Callable[[Grid, torch.Generator], dict[str, Any]]:
    def arguments(grid: Grid, generator: torch.Generator) -> dict[str, Any]:
        angles = torch.rand(tokens(grid), HEAD_DIM // 2, generator=generator).repeat_interleave(2, dim=1)
        return _cog_arguments(patch_time)(grid, generator) | {
            "image_rotary_emb": (angles.cos(), angles.sin())
        }

    return arguments


def _ltx() -> Any:
    return LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        cross_attention_dim=WIDTH,
        num_layers=2,
        caption_channels=16,
    )


def _ltx_arguments(grid: Grid, generator: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _noise(generator, BATCH, tokens(grid), 4),
        "timestep": _timestep(),
        "encoder_hidden_states": _noise(generator, BATCH, TEXT, 16),
        "encoder_attention_mask": _mask(4, 2),
        "num_frames": grid[0],
        "height": grid[1],
        "width": grid[2],
        "rope_interpolation_scale": (0.3, 32, 32),
    }


def _ltx_image_arguments(grid: Grid, generator: torch.Generator) -> dict[str, Any]:
    per_token = 1000 * torch.rand(BATCH, tokens(grid), generator=generator)
    return _ltx_arguments(grid, generator) | {"timestep": per_token}


def _ltx_condition_arguments(grid: Grid, generator: torch.Generator) -> dict[str, Any]:
    """As LTXConditionPipeline calls it, with the pixel coordinates of each token."""
    arguments = _ltx_arguments(grid, generator)
    for name in ("num_frames", "height", "width", "rope_interpolation_scale"):
        del arguments[name]
    axes = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
    scaled = [axis.flatten() * scale for axis, scale in zip(axes, (8 / 25, 32, 32), strict=True)]
    return arguments | {"video_coords": torch.stack(scaled).expand(BATCH, 3, -1)}


def _mochi() -> Any:
    model = MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=2,
        pooled_projection_dim=WIDTH,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=16,
        max_sequence_length=TEXT,
    )
    torch.nn.init.normal_(model.pos_frequencies)  # zeros would hide a wrong position
    return model


def _mochi_arguments(grid: Grid, generator: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": _noise(generator, BATCH, 4, grid[0], 2 * grid[1], 2 * grid[2]),
        "timestep": _timestep(),
        "encoder_hidden_states": _noise(generator, BATCH, TEXT, 16),
        "encoder_attention_mask": _mask(4, 2).bool(),
    }


COG = ("first", (TEXT, TEXT), TEXT)
HUNYUAN = ("last", (4, 2), TEXT)
VARIANTS = [
    Variant("wan21_t2v", _wan(), _wan_arguments, 2),
    Variant("wan22_ti2v", _wan(), _wan_ti2v_arguments, 2),
    Variant(
        "wan21_i2v",
        _wan(in_channels=IMAGE_TO_VIDEO_CHANNELS, image_dim=8, added_kv_proj_dim=WIDTH),
        _wan_i2v_arguments,
        2,
    ),
    Variant(
        "wan_vace",
        _wan(WanVACETransformer3DModel, vace_layers=[0, 1], vace_in_channels=VACE_CHANNELS),
        _vace_arguments,
        4,
    ),
    Variant("skyreels_v2", _wan(SkyReelsV2Transformer3DModel), _wan_arguments, 2),
    Variant("skyreels_v2_forcing", _wan(SkyReelsV2Transformer3DModel), _forcing_arguments, 2),
    Variant("cogvideox_2b", _cog(), _cog_arguments(), 2, *COG),
    Variant("cogvideox_5b", _cog(use_rotary_positional_embeddings=True), _cog_rotary_arguments(), 2, *COG),
    Variant(
        "cogvideox_15",
        _cog(use_rotary_positional_embeddings=True, patch_size_t=2, patch_bias=False),
        _cog_rotary_arguments(2),
        2,
        *COG,
    ),
    Variant("hunyuan", _hunyuan(), _hunyuan_arguments, 2, *HUNYUAN),
    Variant("hunyuan_i2v", _hunyuan(image_condition_type="token_replace"), _hunyuan_arguments, 2, *HUNYUAN),
    Variant("hunyuan15_t2v", _hunyuan15, _hunyuan15_arguments(image=False), 2, "last", (6, 3), TEXT + 5),
    Variant("hunyuan15_i2v", _hunyuan15, _hunyuan15_arguments(image=True), 2, "last", (8, 5), TEXT + 5),
    Variant("ltx_t2v", _ltx, _ltx_arguments, 2),
    Variant("ltx_i2v", _ltx, _ltx_image_arguments, 2),
    Variant("ltx_condition", _ltx, _ltx_condition_arguments, 2),
    Variant("mochi", _mochi, _mochi_arguments, 2, "last", (4, 2), TEXT, drops_padding=True),
]
BY_NAME = {variant.name: variant for variant in VARIANTS}
