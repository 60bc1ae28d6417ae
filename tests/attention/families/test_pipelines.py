"""Whole Diffusers pipelines: what they pass to their transformers is understood.

Text is given as embeddings and latents are taken as they are, so text encoders can be left out, and VAEs
where the pipeline does not ask for one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    ClassifierFreeGuidance,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideoPipeline,
    LTXConditionPipeline,
    LTXPipeline,
    MochiPipeline,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2Pipeline,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanVACEPipeline,
)
from PIL import Image
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

import attention
from tests.attention.families import running
from tests.attention.families.variants import BY_NAME, LATENT, TEXT

pytestmark = [
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
    # LTXConditionPipeline hands a tensor to NumPy.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),
]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _text(seed: int, tokens: int = TEXT) -> Tensor:
    return torch.randn(1, tokens, 16, generator=torch.Generator().manual_seed(seed))


def _masks(width: int = TEXT, /, **names: int) -> dict[str, Tensor]:
    return {name: (torch.arange(width) < length)[None] for name, length in names.items()}


def _ltx_vae() -> AutoencoderKLLTXVideo:
    """This pipeline asks its VAE for a dtype."""
    return AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )


def _wan_vae() -> AutoencoderKLWan:
    """Of pictures to begin with or to keep."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return AutoencoderKLWan(
            base_dim=4,
            z_dim=LATENT,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.0] * LATENT,
            latents_std=[1.0] * LATENT,
        ).eval()


def _hunyuan15_vae() -> AutoencoderKLHunyuanVideo15:
    """This pipeline asks its VAE for the number of channels."""
    return AutoencoderKLHunyuanVideo15(
        latent_channels=LATENT, block_out_channels=(32, 32, 32, 32, 32), layers_per_block=1
    )


def _image_encoder() -> tuple[CLIPImageProcessor, CLIPVisionModel]:
    """Of five tokens of 8 channels; no embeddings can be given beside a picture, nor instead of one."""
    config = CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=4,
        patch_size=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        encoder = CLIPVisionModel(config).eval()
    return CLIPImageProcessor(size={"shortest_edge": 4}, crop_size={"height": 4, "width": 4}), encoder


def _flow() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)


def _picture() -> Image.Image:
    return Image.linear_gradient("L").resize((112, 80)).convert("RGB")


def _guided(text: int = TEXT) -> dict[str, Any]:
    return {
        "prompt_embeds": _text(1, text),
        "negative_prompt_embeds": _text(2, text),
        "guidance_scale": 4.0,
    }


def _two_lengths() -> dict[str, Tensor]:
    return _masks(prompt_attention_mask=5, negative_prompt_attention_mask=2)


# 3 x 5 x 7 tokens where the VAE takes eight pixels a side to one, and the transformer two.
CLIP = {"num_frames": 9, "height": 80, "width": 112}
CASES: dict[str, tuple[Callable[[Any], Any], str, dict[str, Any]]] = {
    "wan_i2v": (
        lambda model: WanImageToVideoPipeline(
            None, None, _wan_vae(), _flow(), *_image_encoder(), transformer=model
        ),
        "wan21_i2v",
        _guided(text=512) | CLIP | {"image": _picture()},
    ),
    "wan22_ti2v": (
        lambda model: WanImageToVideoPipeline(
            None, None, _wan_vae(), _flow(), transformer=model, expand_timesteps=True
        ),
        "wan22_ti2v",
        _guided() | CLIP | {"image": _picture()},
    ),
    "wan_vace": (
        lambda model: WanVACEPipeline(None, None, _wan_vae(), _flow(), model),
        "wan_vace",
        # A frame of latents for the picture, which lies before the clip.
        _guided() | CLIP | {"num_frames": 5, "reference_images": _picture()},
    ),
    "skyreels_v2": (
        lambda model: SkyReelsV2Pipeline(None, None, model, None, _flow()),
        "skyreels_v2",
        _guided() | CLIP,
    ),
    "skyreels_v2_forcing": (
        lambda model: SkyReelsV2DiffusionForcingPipeline(None, None, model, None, _flow()),
        "skyreels_v2_forcing",
        _guided() | CLIP | {"prompt": None},
    ),
    "hunyuan15": (
        lambda model: HunyuanVideo15Pipeline(
            None,
            None,
            model,
            _hunyuan15_vae(),
            FlowMatchEulerDiscreteScheduler(),
            None,
            None,
            ClassifierFreeGuidance(guidance_scale=4.0),
        ),
        "hunyuan15_t2v",
        {
            "prompt_embeds": _text(1),
            "prompt_embeds_2": torch.ones(1, 3, 8),
            "negative_prompt_embeds": _text(2),
            "negative_prompt_embeds_2": torch.ones(1, 3, 8),
            "num_frames": 9,
            "height": 80,
            "width": 112,
        }
        | _masks(prompt_embeds_mask=5, negative_prompt_embeds_mask=2)
        | _masks(3, prompt_embeds_mask_2=1, negative_prompt_embeds_mask_2=0),
    ),
    "cogvideox": (
        lambda model: CogVideoXPipeline(None, None, None, model, CogVideoXDDIMScheduler()),
        "cogvideox_5b",
        _guided() | CLIP,
    ),
    "hunyuan": (
        lambda model: HunyuanVideoPipeline(
            None, None, model, None, FlowMatchEulerDiscreteScheduler(), None, None
        ),
        "hunyuan",
        {
            "prompt_embeds": _text(1),
            "pooled_prompt_embeds": torch.ones(1, 8),
            "negative_prompt_embeds": _text(2),
            "negative_pooled_prompt_embeds": torch.zeros(1, 8),
            "true_cfg_scale": 3.0,
        }
        | CLIP
        | _two_lengths(),
    ),
    "ltx": (
        lambda model: LTXPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, model),
        "ltx_t2v",
        _guided() | _two_lengths() | {"num_frames": 17, "height": 160, "width": 224},
    ),
    "ltx_condition": (
        lambda model: LTXConditionPipeline(FlowMatchEulerDiscreteScheduler(), _ltx_vae(), None, None, model),
        "ltx_condition",
        _guided() | _two_lengths() | {"num_frames": 17, "height": 160, "width": 224},
    ),
    "mochi": (
        lambda model: MochiPipeline(FlowMatchEulerDiscreteScheduler(), None, None, None, model),
        "mochi",
        _guided() | _two_lengths() | {"num_frames": 13, "height": 80, "width": 112},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_runs_swapped(name: str) -> None:
    build, variant_name, call = CASES[name]
    variant = BY_NAME[variant_name]
    model = running.built(variant).float()
    pipe = build(model)
    pipe.set_progress_bar_config(disable=True)

    def latents() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        out: Tensor = pipe(**call, num_inference_steps=2, generator=generator, output_type="latent").frames
        return out

    dense = latents()
    with attention.swap(pipe, block_size=20, anchor_stride=1) as handle:
        exact = latents()
    torch.testing.assert_close(exact, dense, rtol=1e-3, atol=1e-4)
    assert handle.report().tokens == 3 * 5 * 7
    # In two steps, with one batch for both prompts, or one each.
    assert handle.report().sparse_calls in (2 * variant.layers, 2 * 2 * variant.layers)
    with attention.swap(pipe, token_order="tile", tile_thw=(2, 2, 3), anchor_stride=5) as handle:
        sparse = latents()
    assert bool(sparse.isfinite().all())
    assert (sparse - dense).abs().max() > 1e-3
    assert torch.equal(latents(), dense)
    assert handle.report().density < 0.6
