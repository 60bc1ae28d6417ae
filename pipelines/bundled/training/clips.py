"""Clips and prompts as training data: choice of specs, frames as arrays, and sets of encoded latents.

Knows what a training example is. Does not know losses.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pipelines.bundled.drawing import render
from pipelines.bundled.prompts import prompt, varied_prompt
from pipelines.bundled.training.components import TEXT_TOKENS
from pipelines.bundled.world import ClipSpec

# Sentences kept for each clip: the canonical one, then varied ones.
SENTENCES = 4


@dataclass(frozen=True, slots=True)
class Latents:
    """Encoded clips of one size: latents [N, C, T, H, W] (normalised, bfloat16), ids [N, SENTENCES, L]."""

    latents: Tensor
    token_ids: Tensor

    def __len__(self) -> int:
        return len(self.latents)

    @property
    def grid(self) -> tuple[int, int, int]:
        frames, rows, columns = self.latents.shape[2:]
        return frames, rows, columns


def pick_specs(pool: Sequence[ClipSpec], count: int, generator: torch.Generator) -> list[ClipSpec]:
    return [pool[index] for index in torch.randint(len(pool), (count,), generator=generator).tolist()]


def to_frames(clips: Tensor) -> list[NDArray[np.uint8]]:
    """Clips [B, 3, T, H, W] in [-1, 1] as uint8 arrays [T, H, W, 3]."""
    scaled = ((clips.float() + 1) * 127.5).round_().clamp_(0, 255).to(torch.uint8)
    return list(scaled.permute(0, 2, 3, 4, 1).cpu().numpy())


@torch.no_grad()
def encode(vae: AutoencoderKLWan, clips: Tensor) -> Tensor:
    """Latents [B, C, T', H', W'] in float32 of clips [B, 3, T, H, W], not normalised."""
    with torch.autocast(clips.device.type, torch.bfloat16):
        latents: Tensor = vae.encode(clips).latent_dist.mode()
    return latents.float()


def normalise(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Latents with mean 0 and deviation 1 per channel, as the transformer sees them."""
    mean, std = (
        torch.tensor(vae.config[name], device=latents.device).view(1, -1, 1, 1, 1)
        for name in ("latents_mean", "latents_std")
    )
    return (latents - mean) / std


def token_ids(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], device: torch.device) -> Tensor:
    """Ids [B, TEXT_TOKENS], padded with 0.

    Raises:
        ValueError: a prompt is longer than TEXT_TOKENS.
    """
    encoded = tokenizer(
        list(prompts), padding="max_length", max_length=TEXT_TOKENS, return_tensors="pt"
    ).input_ids
    if encoded.shape[1] != TEXT_TOKENS:
        raise ValueError(f"a prompt has {encoded.shape[1]} tokens; at most {TEXT_TOKENS} fit")
    ids: Tensor = encoded.to(device)
    return ids


def sentences(spec: ClipSpec, rng: random.Random) -> list[str]:
    return [prompt(spec), *(varied_prompt(spec, rng) for _ in range(SENTENCES - 1))]


@torch.no_grad()
def draw_latents(
    vae: AutoencoderKLWan,
    specs: Sequence[ClipSpec],
    generator: torch.Generator,
    *,
    side: int,
    frames: int,
    device: torch.device,
) -> Tensor:
    """Draw one clip per spec and encode it: normalised latents in bfloat16."""
    clips = render(specs, generator, height=side, width=side, num_frames=frames, device=device)
    return normalise(vae, encode(vae, clips)).to(torch.bfloat16)
