"""The parts of the bundled model and how they become a Diffusers folder.

Knows the sizes of every part. Does not know how they are trained.
"""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from pipelines.bundled.prompts import vocabulary

LATENT_CHANNELS = 16
SPATIAL_FACTOR = 8
TEMPORAL_FACTOR = 4
# Every prompt is zero-padded to this length, in training and in use (`max_sequence_length` of the preset):
# Wan does not mask the padding, so another length is another model.
TEXT_TOKENS = 32
FLOW_SHIFT = 5.0
_SPECIAL = ("<pad>", "</s>", "<unk>")
# Room for words that a later vocabulary adds without a change of shapes.
_EMBEDDINGS = 128
_TEXT_DIM = 128
# Where Diffusers notes the folder that a part was read from: of no use to others.
_LOADED_FROM = "_name_or_path"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the grammar; any other word or sign is ``<unk>``."""
    ids = {word: index for index, word in enumerate((*_SPECIAL, *vocabulary()))}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", ids["</s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=TEXT_TOKENS,
    )


def make_text_encoder() -> UMT5EncoderModel:
    config = UMT5Config(
        vocab_size=_EMBEDDINGS,
        d_model=_TEXT_DIM,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return UMT5EncoderModel(config)


def make_vae() -> AutoencoderKLWan:
    """8x in space, 4x in time, 16 channels. Widths that are no multiples of 16 decode far slower on CPUs."""
    return AutoencoderKLWan(
        base_dim=32,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        patch_size=2,
        in_channels=12,
        out_channels=12,
        scale_factor_spatial=SPATIAL_FACTOR,
        scale_factor_temporal=TEMPORAL_FACTOR,
        is_residual=True,
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def make_transformer(layers: int = 8) -> WanTransformer3DModel:
    """Every latent position is a token; the output starts at zero."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=4,
        attention_head_dim=64,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=_TEXT_DIM,
        freq_dim=64,
        ffn_dim=1024,
        num_layers=layers,
        rope_max_seq_len=64,
    )
    torch.nn.init.zeros_(transformer.proj_out.weight)
    torch.nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def make_pipeline(
    text_encoder: UMT5EncoderModel, vae: AutoencoderKLWan, transformer: WanTransformer3DModel
) -> WanPipeline:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=FLOW_SHIFT,
    )
    pipeline = WanPipeline(
        tokenizer=make_tokenizer(),
        text_encoder=text_encoder,
        vae=vae,
        transformer=transformer,
        scheduler=scheduler,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_pipeline(pipeline: WanPipeline, folder: Path) -> None:
    """Write the Diffusers folder, with the tokenizer class that transformers 4 and 5 both read."""
    pipeline.save_pretrained(folder)
    _edit_json(folder / "model_index.json", tokenizer=["transformers", "PreTrainedTokenizerFast"])
    _edit_json(folder / "tokenizer" / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    for part in ("vae", "transformer"):
        _edit_json(folder / part / "config.json", drop=_LOADED_FROM)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)


def _edit_json(path: Path, *, drop: str = "", **changes: object) -> None:
    content = json.loads(path.read_text()) | changes
    content.pop(drop, None)
    path.write_text(json.dumps(content, indent=2) + "\n")
