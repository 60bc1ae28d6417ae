from typing import Any

import pytest
from pydantic import ValidationError

from configs.attention import AttentionConfig
from configs.job import MAX_SEED
from configs.model_preset import find_model
from configs.resolve import GenerationRequest, RequestError, resolve

PRESET = find_model("wan2.1-t2v-1.3b")


def resolved(**request: Any) -> Any:
    return resolve(GenerationRequest(prompt="a boat", **request), PRESET, PRESET.attention)


def test_what_is_not_said_is_the_models_default() -> None:
    job = resolved()
    assert (job.width, job.height, job.num_frames, job.fps) == (832, 480, 81, 16)
    assert (job.num_inference_steps, job.guidance_scale, job.negative_prompt) == (50, 5.0, "")
    assert job.attention == AttentionConfig(block_size=3120, anchor_stride=17)
    assert 0 <= job.seed <= MAX_SEED
    assert resolved().seed != job.seed or resolved().seed != job.seed


def test_a_step_cache_is_the_models_unless_said() -> None:
    defaults = PRESET.defaults.model_copy(update={"step_cache": "taylor_seer"})
    preset = PRESET.model_copy(update={"defaults": defaults})
    for said, cache in ((None, "taylor_seer"), ("off", "off"), ("first_block", "first_block")):
        request = GenerationRequest.model_validate({"prompt": "a boat", "step_cache": said})
        assert resolve(request, preset, preset.attention).step_cache == cache


def test_what_is_said_is_kept_zero_included() -> None:
    job = resolved(size="480x832", num_frames=5, fps=8, num_inference_steps=1, guidance_scale=0, seed=0)
    assert (job.width, job.height, job.num_frames, job.fps) == (480, 832, 5, 8)
    assert (job.num_inference_steps, job.guidance_scale, job.seed) == (1, 0, 0)
    assert resolved(seconds=4).num_frames == 65
    assert resolved(seconds=4, fps=8).num_frames == 33


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        ({"size": "830x480"}, "size", "width 830 is not a multiple of 16; nearest valid: 816 or 832"),
        ({"size": "32x480"}, "size", "width 32 is outside 64 to 1920"),
        (
            {"step_cache": "first_block", "attention": {"anchor_rotation": True}},
            "step_cache",
            "anchor_rotation changes the order of tokens between steps",
        ),
        ({"num_frames": 80}, "num_frames", "nearest valid: 77 or 81"),
        ({"num_frames": 245}, "num_frames", "num_frames 245 is above the limit of 241"),
        ({"num_frames": 5, "seconds": 1}, "num_frames", "either seconds or num_frames"),
        ({"seconds": 60}, "seconds", "is 961 frames; wan2.1-t2v-1.3b makes at most 241"),
        ({"num_inference_steps": 201}, "num_inference_steps", "above the limit of 200"),
        ({"num_inference_steps": 10**400}, "num_inference_steps", r"10{16}\.\.\. is above the limit of 200"),
        ({"guidance_scale": 31}, "guidance_scale", "above the limit of 30"),
        ({"attention": {"backend": "dense", "block_size": 4}}, "attention", "no effect with backend=dense"),
        (
            {"attention": {"dense_layers": [0, 30]}},
            "attention.dense_layers",
            r"\[30\], but .* layers 0 to 29",
        ),
    ],
)
def test_what_cannot_run_names_field_and_nearest(request_: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        resolved(**request_)
    assert raised.value.field == field


def test_a_blank_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt is blank") as raised:
        resolve(GenerationRequest(prompt=" \n"), PRESET, PRESET.attention)
    assert raised.value.field == "prompt"


@pytest.mark.parametrize(
    "size", ["832", "832x", "0x480", "832X480", "832x480 ", "832x480x1", "-1x5", "\uff18x480"]
)
def test_a_size_that_is_none_says_what_would_be(size: str) -> None:
    with pytest.raises(ValidationError, match="is not WIDTHxHEIGHT in pixels, such as 832x480"):
        GenerationRequest(prompt="a boat", size=size)
