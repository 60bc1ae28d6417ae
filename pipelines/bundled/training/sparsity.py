"""Lets a transformer in training see sparse attention as the server's general default has it.

Knows the anchor-and-block rule as a mask, which is affordable at this model's few thousand tokens and lets
autograd through. Does not know the kernels that serve it (`attention`).
"""

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor

# What the general default (`configs.attention`) resolves to at this model's size; its preset is more careful.
BLOCK_FRAMES = 2
ANCHOR_STRIDE = 17
DENSE_STEPS_SHARE = 0.2


class MaskedAttention(WanAttnProcessor):  # type: ignore[misc]
    """Wan's self-attention under ``mask`` ([1, 1, N, N], True: attends; None: dense), one for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        mask = self.mask if attention_mask is None else attention_mask
        return super().__call__(attn, hidden_states, encoder_hidden_states, mask, rotary_emb)  # type: ignore[no-any-return]


def install(transformer: WanTransformer3DModel) -> MaskedAttention:
    """Put one `MaskedAttention` into every self-attention; it is dense until its mask is set."""
    processor = MaskedAttention()
    for block in transformer.blocks:
        block.attn1.set_processor(processor)
    return processor


def anchor_local_mask(grid: tuple[int, int, int], device: torch.device) -> Tensor:
    """The default rule for a latent grid (frames, rows, columns): bool [1, 1, N, N] in raster order."""
    frames, rows, columns = grid
    token = torch.arange(frames * rows * columns, device=device)
    block = token // (BLOCK_FRAMES * rows * columns)
    anchor = token % ANCHOR_STRIDE == 0
    return ((block[:, None] == block) | anchor[:, None] | anchor)[None, None]
