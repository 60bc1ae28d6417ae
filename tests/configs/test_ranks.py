"""What several GPUs refuse before a model is loaded."""

import pytest

from configs.job import JobParameters
from configs.model_preset import find_model
from configs.ranks import check_ranks_can_share, token_ranks
from configs.resolve import GenerationRequest, RequestError, resolve


def clip(**fields: object) -> JobParameters:
    """A clip of the bundled model."""
    preset = find_model("reelwright-shapes")
    request = GenerationRequest.model_validate({"prompt": "a red circle", "seed": 0, **fields})
    return resolve(request, preset, preset.attention)


REFUSED = [
    ({"attention": {"backend": "block_topk"}}, "attention.backend"),
    ({"attention": {"backend": "anchor_local", "precision": "fp8"}}, "attention.precision"),
    ({"step_cache": "taylor_seer"}, "step_cache"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_what_shared_tokens_do_not_allow_is_refused(fields: dict[str, object], field: str) -> None:
    params = clip(**fields)
    with pytest.raises(RequestError, match="where 4 GPUs share a clip's tokens; take ") as caught:
        check_ranks_can_share(params, 4)
    assert caught.value.field == field
    check_ranks_can_share(params, 1)


@pytest.mark.parametrize(("fields", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_two_gpus_that_split_guidance_share_no_tokens(fields: dict[str, object], field: str) -> None:
    params = clip(guidance_scale=2.0, **fields)
    check_ranks_can_share(params, 2)
    with pytest.raises(RequestError, match="where 3 GPUs share"):
        check_ranks_can_share(params, 3)
    with pytest.raises(RequestError, match="where 2 GPUs share"):
        check_ranks_can_share(params, 4)


@pytest.mark.parametrize("backend", ["anchor_local", "window", "dense"])
def test_other_attention_is_for_any_number(backend: str) -> None:
    check_ranks_can_share(clip(attention={"backend": backend}), 4)


def test_passes_of_guidance_are_split_between_an_even_number() -> None:
    found = [token_ranks(scale, gpus) for scale in (1.0, 3.0) for gpus in (1, 2, 3, 4)]
    assert found == [1, 2, 3, 4, 1, 1, 3, 2]
