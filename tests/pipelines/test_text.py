"""Prompts to embeddings, and the report of what was cut."""

from collections.abc import Iterator

import pytest
import torch

from configs.job import JobParameters
from pipelines import LoadedPipeline
from pipelines.text import cut_warning, encode_text, uses_guidance
from tests.tiny_wan import MAX_SEQUENCE_LENGTH

WORDS = MAX_SEQUENCE_LENGTH - 1  # the end mark takes one


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("scale", [0.0, 1.0, 1.5])
def test_embeddings_are_the_stock_pipelines(
    loaded: LoadedPipeline, params: JobParameters, scale: float
) -> None:
    params = params.model_copy(update={"guidance_scale": scale, "negative_prompt": "a black square"})
    positive, negative = loaded.pipe.encode_prompt(
        params.prompt, params.negative_prompt, scale > 1, max_sequence_length=MAX_SEQUENCE_LENGTH
    )
    text = encode_text(loaded, params)
    assert text.positive.shape == (1, MAX_SEQUENCE_LENGTH, 32)
    assert torch.equal(text.positive, positive)
    assert uses_guidance(params) == (scale > 1)
    if scale > 1:
        assert text.negative is not None
        assert torch.equal(text.negative, negative)
        assert not torch.equal(text.negative, text.positive)
    else:
        assert text.negative is None


def test_an_empty_negative_prompt_still_guides(loaded: LoadedPipeline, params: JobParameters) -> None:
    text = encode_text(loaded, params.model_copy(update={"guidance_scale": 4.0, "negative_prompt": ""}))
    assert text.negative is not None
    assert text.warnings == ()


def test_a_negative_prompt_without_guidance_is_said(loaded: LoadedPipeline, params: JobParameters) -> None:
    text = encode_text(loaded, params.model_copy(update={"negative_prompt": "black"}))
    assert text.warnings == ("negative_prompt has no effect: guidance_scale 1 is not above 1",)


@pytest.mark.parametrize("prompt", ["red", " ".join(["red"] * WORDS), "  red \n &amp; blue "])
def test_a_prompt_that_fits_is_no_warning(loaded: LoadedPipeline, prompt: str) -> None:
    assert cut_warning(loaded, "prompt", prompt) is None


@pytest.mark.parametrize(
    ("tail", "cut"),
    [
        ("up", "up"),
        ("up and  down", "up and down"),
        ("zebra", "zebra"),  # no word of the vocabulary, one unknown token
        ("up, down!", "up, down!"),
    ],
)
def test_the_words_that_are_cut_are_named(loaded: LoadedPipeline, tail: str, cut: str) -> None:
    prompt = " ".join(["red"] * WORDS) + " " + tail
    tokens = WORDS + {"up": 1, "up and  down": 3, "zebra": 1, "up, down!": 4}[tail]
    assert cut_warning(loaded, "prompt", prompt) == (
        f"prompt: {WORDS} of {tokens} text tokens are used; cut: '{cut}'"
    )


def test_what_is_cut_has_no_effect_and_what_is_kept_has(
    loaded: LoadedPipeline, params: JobParameters
) -> None:
    kept = " ".join(["red"] * WORDS)
    shorter = " ".join(["red"] * (WORDS - 1))
    short, cut, changed = (
        encode_text(loaded, params.model_copy(update={"prompt": prompt})).positive
        for prompt in (kept, f"{kept} blue", f"{shorter} blue green")
    )
    assert torch.equal(short, cut)
    assert not torch.equal(short, changed)


def test_both_prompts_are_reported(loaded: LoadedPipeline, params: JobParameters) -> None:
    long = " ".join(["red"] * WORDS)
    text = encode_text(
        loaded,
        params.model_copy(
            update={"prompt": f"{long} up", "negative_prompt": f"{long} down", "guidance_scale": 3.0}
        ),
    )
    assert text.warnings == (
        f"prompt: {WORDS} of {WORDS + 1} text tokens are used; cut: 'up'",
        f"negative_prompt: {WORDS} of {WORDS + 1} text tokens are used; cut: 'down'",
    )
