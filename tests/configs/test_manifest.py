"""The manifest as JSON."""

import json

import pytest
from pydantic import ValidationError

from configs.attention import AttentionConfig
from configs.job import AttentionReport, JobParameters, RunEnvironment
from configs.manifest import Manifest


def manifest_of(prompt: str = "a red circle") -> Manifest:
    """A manifest with odd numbers in it."""
    parameters = JobParameters(
        model="tiny",
        prompt=prompt,
        negative_prompt="",
        width=64,
        height=48,
        num_frames=9,
        fps=16,
        num_inference_steps=3,
        guidance_scale=0.1 + 0.2,
        seed=2**32 - 1,
        attention=AttentionConfig(backend="anchor_local", dense_steps=0.3),
    )
    attention = AttentionReport(
        backend="anchor_local",
        implementation="torch",
        tokens=48,
        density=1 / 3,
        sparse_calls=4,
        dense_calls=2,
        dense_reasons={"dense_steps": 2},
    )
    environment = RunEnvironment(
        source="someone/tiny",
        revision=None,
        pipeline="WanPipeline",
        scheduler="UniPCMultistepScheduler",
        device="cpu",
        dtype="float32",
        vae_dtype="float32",
        versions={"torch": "2.13.0+cpu"},
    )
    return Manifest.of(parameters, attention, environment)


@pytest.mark.parametrize(
    "prompt", ["a red circle", 'say "hi";\n\\n = # %s\t', "тень 影 🌀 e\u0301", "\u0000\u2028", "x" * 10_000]
)
def test_json_and_back_is_the_same(prompt: str) -> None:
    manifest = manifest_of(prompt)
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest
    assert Manifest.model_validate(json.loads(json.dumps(manifest.model_dump(mode="json")))) == manifest


def test_it_says_what_it_is() -> None:
    content = json.loads(manifest_of().model_dump_json())
    assert (content["object"], content["version"]) == ("video.manifest", 1)


@pytest.mark.parametrize("change", [{"version": 2}, {"object": "video"}, {"extra": 1}, {"parameters": {}}])
def test_another_object_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Manifest.model_validate(manifest_of().model_dump(mode="json") | change)
