"""A tiny Wan transformer with random weights, run plainly or with a mask in its self-attention."""

from typing import Any

import diffusers.models.transformers.transformer_wan as transformer_wan
import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Grid = tuple[int, int, int]
# 3 latent frames of 5 x 7 tokens, no multiple of anything.
GRID: Grid = (3, 5, 7)
TOKENS = 105
TEXT_TOKENS = 9
LAYERS = 3
HEADS = 2


def tiny_transformer() -> WanTransformer3DModel:
    """The same weights every time."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=HEADS,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=LAYERS,
        rope_max_seq_len=32,
    )
    return model.eval()


def run(transformer: Any, timestep: Tensor | None = None, grid: Grid = GRID) -> Tensor:
    """One forward pass of a classifier-free-guidance batch of two."""
    generator = torch.Generator().manual_seed(0)
    dtype = transformer.dtype
    latents = torch.randn(2, 4, grid[0], 2 * grid[1], 2 * grid[2], generator=generator).to(dtype)
    text = torch.randn(2, TEXT_TOKENS, 16, generator=generator).to(dtype)
    timestep = torch.tensor([700.0, 700.0]) if timestep is None else timestep
    out: Tensor = transformer(
        hidden_states=latents, timestep=timestep, encoder_hidden_states=text, return_dict=False
    )[0]
    return out


def run_masked(transformer: Any, mask: Tensor, grid: Grid = GRID) -> Tensor:
    """The same with a boolean [tokens, tokens] mask in self-attention, in raster order."""

    def masked(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        is_cross = key.shape[1] == TEXT_TOKENS
        return scaled_dot_product_attention(q, k, v, attn_mask=None if is_cross else mask).transpose(1, 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_wan, "dispatch_attention_fn", masked)
        return run(transformer, grid=grid)
