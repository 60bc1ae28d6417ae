"""Whole Diffusers pipelines: what they pass to their transformers is understood.

Text is given as embeddings and latents are taken as they are, so text encoders and VAEs can be left out.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    LTXConditionPipeline,
    LTXPipeline,
    MochiPipeline,
)
from torch import Tensor

import attention
from tests.attention.families import running
from tests.attention.families.variants import BY_NAME, TEXT

pytestmark = [
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
    # LTXConditionPipeline hands a tensor to NumPy.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),
]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _text(seed: int) -> Tensor:
    return torch.randn(1, TEXT, 16, generator=torch.Generator().manual_seed(seed))


def _masks(**names: int) -> dict[str, Tensor]:
    return {name: (torch.arange(TEXT) < length)[None] for name, length in names.items()}


def _ltx_vae() -> AutoencoderKLLTXVideo:
    """This pipeline asks its VAE for a dtype."""
    return AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )


def _guided() -> dict[str, Any]:
    return {"prompt_embeds": _text(1), "negative_prompt_embeds": _text(2), "guidance_scale": 4.0}


def _two_lengths() -> dict[str, Tensor]:
    return _masks(prompt_attention_mask=5, negative_prompt_attention_mask=2)


CASES: dict[str, tuple[Callable[[Any], Any], str, dict[str, Any]]] = {
    "cogvideox": (
        lambda model: CogVideoXPipeline(None, None, None, model, CogVideoXDDIMScheduler()),
        "cogvideox_5b",
        _guided() | {"num_frames": 9, "height": 80, "width": 112},
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
            "num_frames": 9,
            "height": 80,
            "width": 112,
        }
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
    model = running.built(BY_NAME[variant_name]).float()
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
    assert handle.report().sparse_calls in (2 * 2, 2 * 2 * 2)  # one batch for both prompts, or one each
    with attention.swap(pipe, token_order="tile", tile_thw=(2, 2, 3), anchor_stride=5) as handle:
        sparse = latents()
    assert bool(sparse.isfinite().all())
    assert (sparse - dense).abs().max() > 1e-3
    assert torch.equal(latents(), dense)
    assert handle.report().density < 0.6
