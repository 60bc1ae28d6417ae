"""Where self-attention sits in the transformers that can be swapped, and where tokens are made and undone.

One row a class. Facts are those of Diffusers 0.42; the tests hold every row against the stock model.
"""

import re
from dataclasses import replace
from typing import Any

from torch import nn

from attention.diffusers_door import apply_rotary
from attention.families.family import Arguments, Config, Joint, PerToken, TransformerFamily
from attention.families.grids import frames_first, packed, three_patches, two_patches, whole_frames
from attention.families.joint import rotate_pairs
from attention.families.moves import Move, along, behind_text, frames_in_batch, voxels
from attention.families.texts import all_valid, counted, leading, two_texts_and_image


def _replaces_first_frame(config: Config, arguments: Arguments) -> bool:
    """HunyuanVideo modulates the first frame's tokens, a prefix, in their own way."""
    return bool(config.image_condition_type == "token_replace")


def _has_frame_timesteps(config: Config, arguments: Arguments) -> bool:
    """Diffusion forcing makes modulation for each token inside the transformer, in raster order."""
    return bool(arguments.get("enable_diffusion_forcing"))


def _is_causal(config: Config, arguments: Arguments) -> str | None:
    if config.num_frame_per_block > 1:
        return "causal blocks of frames (num_frame_per_block > 1) need a mask, which the swap does not take"
    return None


_WAN = TransformerFamily(
    self_attention=r"blocks\.\d+\.attn1",
    grid=three_patches,
    moves=(Move("patch_embedding", voxels), Move("rope", along(1)), Move("proj_out", along(1), back=True)),
    per_token=(PerToken("timestep", 1),),  # Wan 2.2 TI2V
)
_HUNYUAN = TransformerFamily(
    self_attention=r"(single_)?transformer_blocks\.\d+\.attn",
    grid=two_patches,
    moves=(Move("x_embedder", along(1)), Move("rope", along(0)), Move("proj_out", along(1), back=True)),
    joint=Joint(text=counted, processor="HunyuanVideoAttnProcessor2_0", rotate=apply_rotary, masked=True),
    stays=_replaces_first_frame,
)

FAMILIES = {
    "CogVideoXTransformer3DModel": TransformerFamily(
        self_attention=r"transformer_blocks\.\d+\.attn1",
        grid=frames_first,
        moves=(Move("patch_embed", behind_text), Move("proj_out", along(1), back=True)),
        per_token=(PerToken("image_rotary_emb", 0),),
        joint=Joint(text=all_valid, processor="CogVideoXAttnProcessor2_0", rotate=apply_rotary, masked=False),
    ),
    "HunyuanVideo15Transformer3DModel": replace(
        _HUNYUAN,
        self_attention=r"transformer_blocks\.\d+\.attn",
        joint=Joint(
            text=two_texts_and_image,
            processor="HunyuanVideo15AttnProcessor2_0",
            rotate=apply_rotary,
            masked=True,
        ),
        stays=lambda config, arguments: False,
    ),
    "HunyuanVideoTransformer3DModel": _HUNYUAN,
    "LTXVideoTransformer3DModel": TransformerFamily(
        self_attention=r"transformer_blocks\.\d+\.attn1",
        grid=packed,
        moves=(Move("proj_in", along(1)), Move("rope", along(1)), Move("proj_out", along(1), back=True)),
        per_token=(PerToken("timestep", 1),),  # image to video
    ),
    "MochiTransformer3DModel": TransformerFamily(
        self_attention=r"transformer_blocks\.\d+\.attn1",
        grid=whole_frames,
        moves=(
            Move("patch_embed", frames_in_batch),
            Move("rope", along(0)),
            Move("proj_out", along(1), back=True),
        ),
        joint=Joint(text=leading, processor="MochiAttnProcessor2_0", rotate=rotate_pairs, masked=True),
    ),
    "SkyReelsV2Transformer3DModel": replace(
        _WAN, per_token=(), stays=_has_frame_timesteps, refused=_is_causal
    ),
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": replace(
        _WAN,
        self_attention=r"(vace_)?blocks\.\d+\.attn1",
        moves=(*_WAN.moves, Move("vace_patch_embedding", voxels)),
        per_token=(),
    ),
}


def family_of(transformer: nn.Module) -> TransformerFamily:
    """The row of this model. Raises ValueError naming the class and the known ones."""
    name = type(transformer).__name__
    if name not in FAMILIES:
        raise ValueError(f"cannot swap attention in {name}; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def self_attention_modules(transformer: nn.Module, family: TransformerFamily) -> dict[str, Any]:
    """Self-attention modules by name, in layer order."""
    pattern = re.compile(family.self_attention)
    found = {name: module for name, module in transformer.named_modules() if pattern.fullmatch(name)}
    if not found:
        raise ValueError(f"{type(transformer).__name__} has no module {family.self_attention}")
    return found
