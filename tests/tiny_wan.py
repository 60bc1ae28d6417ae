"""A tiny Wan model with random weights: a real Diffusers folder whose job takes about a second on one core.

Knows: the parts of a WanPipeline folder and a preset that fits it. Does not know: what the pictures show
(noise; they are neither flat nor meaningful).
"""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from configs.attention import AttentionConfig
from configs.geometry import VideoGeometry
from configs.model_preset import GenerationDefaults, GenerationLimits, ModelPreset

WORDS = "a an the red green blue circle square triangle moving left right up down on white black background"
SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
TEXT_DIM = 32
LATENT_CHANNELS = 4
MAX_SEQUENCE_LENGTH = 16


def write_tiny_wan(folder: Path, *, seed: int = 0, two_transformers: bool = False) -> Path:
    """Write the folder and return it. The same seed gives the same weights; global random state is kept.

    With ``two_transformers`` the second one takes over after the first of three steps, as in Wan 2.2 A14B.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipe = WanPipeline(
            tokenizer=_tokenizer(),
            text_encoder=_text_encoder().eval(),
            vae=_vae().eval(),
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
            ),
            transformer=_transformer().eval(),
            transformer_2=_transformer().eval() if two_transformers else None,
            boundary_ratio=0.9 if two_transformers else None,
        )
    pipe.save_pretrained(folder)
    _name_portable_tokenizer_class(folder / "model_index.json")
    return folder


def tiny_preset(folder: Path) -> ModelPreset:
    """A preset for that folder. ``min_tokens`` is 0, so that its 48 tokens really run sparse."""
    return ModelPreset(
        name="tiny-wan",
        source=str(folder),
        description="Random weights, for tests.",
        geometry=VideoGeometry(vae_spatial=8, vae_temporal=4, patch=(1, 2, 2)),
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        defaults=GenerationDefaults(
            width=64, height=64, num_frames=9, fps=8, num_inference_steps=3, guidance_scale=1.0
        ),
        limits=GenerationLimits(min_side=16, max_side=256, max_num_frames=33, max_num_inference_steps=50),
        attention=AttentionConfig(backend="anchor_local", min_tokens=0),
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate((*SPECIAL_TOKENS, *WORDS.split()))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def _text_encoder() -> UMT5EncoderModel:
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=64,
            d_model=TEXT_DIM,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )


def _vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, -0.4],
        latents_std=[1.5, 1.2, 0.9, 1.1],
    )


def _transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=32,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
    )


def tiny_transformer(seed: int = 0) -> WanTransformer3DModel:
    """Its transformer by itself; the same seed gives the same weights, global random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _transformer().eval()


def tiny_vae(seed: int = 0) -> AutoencoderKLWan:
    """Its VAE by itself, likewise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _vae().eval()


def _name_portable_tokenizer_class(model_index: Path) -> None:
    # transformers 5 writes a class name that transformers 4 does not know.
    content = json.loads(model_index.read_text(encoding="utf-8"))
    content["tokenizer"] = ["transformers", "PreTrainedTokenizerFast"]
    model_index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
