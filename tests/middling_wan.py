"""A Wan of middling size with random weights: about 900 MB in bfloat16, for tests of memory on a GPU.

Knows: the tiny model's tokenizer, VAE and scheduler. Does not know: what its pictures show (noise).
"""

from pathlib import Path

import torch
from diffusers import WanPipeline, WanTransformer3DModel
from transformers import UMT5EncoderModel

from tests.tiny_wan import LATENT_CHANNELS, write_tiny_wan

TEXT_DIM = 1024


def write_middling_wan(folder: Path) -> Path:
    """Write the folder and return it: a third of the weights in the text encoder, the rest in 8 blocks."""
    tiny = WanPipeline.from_pretrained(write_tiny_wan(folder))
    config = tiny.text_encoder.config
    config.d_model, config.d_ff, config.d_kv, config.num_heads, config.num_layers = TEXT_DIM, 4096, 64, 16, 8
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tiny.text_encoder = UMT5EncoderModel(config).eval()
        tiny.transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=12,
            attention_head_dim=128,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_DIM,
            freq_dim=256,
            ffn_dim=8960,
            num_layers=8,
        ).eval()
    for part in ("text_encoder", "transformer"):
        getattr(tiny, part).to(torch.bfloat16).save_pretrained(folder / part)
    return folder
