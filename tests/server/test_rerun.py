"""A manifest's parameters run as they are, or are refused like those of a new request."""

from typing import Any

import pytest

from configs.attention import AttentionConfig
from configs.job import JobParameters, RunEnvironment
from configs.manifest import Manifest
from configs.model_preset import ModelPreset
from configs.resolve import RequestError
from server.rerun import rerun_parameters
from tests.server.samples import parameters, result

ENVIRONMENT = RunEnvironment(
    source="nowhere",
    revision=None,
    pipeline="WanPipeline",
    scheduler="UniPCMultistepScheduler",
    device="cpu",
    dtype="float32",
    vae_dtype="float32",
    versions={},
)
PRESET = ModelPreset(name="tiny-wan", source="nowhere", num_layers=2)


def manifest_of(asked: JobParameters) -> Manifest:
    """The manifest of a job that ran with these parameters."""
    return Manifest.of(asked, result().attention, ENVIRONMENT)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"checkpoint_every": 3, "negative_prompt": "blur", "guidance_scale": 0.0},
        {"attention": AttentionConfig(backend="dense")},
        {"step_cache": "taylor_seer"},
        {"attention": AttentionConfig(backend="dense", block_size=5, anchor_stride=7, anchor_offset=6)},
        {"attention": AttentionConfig(block_size=1, anchor_stride=1, dense_layers=(0, 1), dense_steps=3)},
    ],
)
def test_they_come_back_unchanged(changes: dict[str, Any]) -> None:
    asked = parameters().model_copy(update=changes)
    assert rerun_parameters(manifest_of(asked), PRESET) == asked


def test_the_servers_own_attention_does_not_matter() -> None:
    preset = PRESET.model_copy(update={"attention": AttentionConfig(backend="dense")})
    assert rerun_parameters(manifest_of(parameters()), preset) == parameters()


@pytest.mark.parametrize(
    ("changes", "field", "hint"),
    [
        ({"model": "other"}, "manifest.parameters.model", "served here: tiny-wan"),
        ({"width": 70}, "manifest.parameters", "nearest valid: 64 or 80"),
        ({"height": -64}, "manifest.parameters.size", "WIDTHxHEIGHT"),
        ({"num_frames": 10}, "manifest.parameters", "nearest valid: 9 or 13"),
        ({"num_frames": 100_001}, "manifest.parameters.num_frames", "less than or equal"),
        ({"num_frames": 0}, "manifest.parameters.num_frames", "greater than or equal"),
        ({"fps": 0}, "manifest.parameters.fps", "greater than or equal"),
        ({"num_inference_steps": 201}, "manifest.parameters", "above the limit of 200"),
        ({"num_inference_steps": 0}, "manifest.parameters.num_inference_steps", "greater than or equal"),
        ({"guidance_scale": float("nan")}, "manifest.parameters.guidance_scale", "finite"),
        ({"guidance_scale": 31.0}, "manifest.parameters", "above the limit of 30"),
        ({"prompt": ""}, "manifest.parameters.prompt", "at least 1"),
        ({"prompt": "  "}, "manifest.parameters", "blank"),
        ({"attention": AttentionConfig()}, "manifest.parameters", "leaves something to be decided"),
        (
            {"attention": AttentionConfig(block_size=32, anchor_stride=17, dense_layers=(2,))},
            "manifest.parameters",
            "layers 0 to 1",
        ),
    ],
)
def test_what_the_model_cannot_run_is_named(changes: dict[str, Any], field: str, hint: str) -> None:
    with pytest.raises(RequestError, match="manifest") as caught:
        rerun_parameters(manifest_of(parameters().model_copy(update=changes)), PRESET)
    assert caught.value.field == field
    assert hint in str(caught.value)
