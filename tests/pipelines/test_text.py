"""Prompts to embeddings, and the report of what was cut."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from configs.job import JobCancelledError, JobParameters
from pipelines import LoadedPipeline
from pipelines.cancel import CancelFlag, checked_inside
from pipelines.text import cut_warning, encode_ahead, encode_text, uses_guidance
from tests.pipelines.jobs import finished
from tests.tiny_wan import MAX_SEQUENCE_LENGTH

WORDS = MAX_SEQUENCE_LENGTH - 1  # the end mark takes one


@pytest.fixture(autouse=True)
def _nothing_encoded_yet(loaded: LoadedPipeline) -> None:
    loaded.texts.clear()


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


GUIDED = {"guidance_scale": 3.0, "negative_prompt": "a black square " * 9}


def _calls(loaded: LoadedPipeline) -> tuple[list[int], Callable[[], None]]:
    """A list that grows by one for every pass of the encoder, and how to stop that."""
    seen: list[int] = []
    hook = loaded.pipe.text_encoder.register_forward_pre_hook(
        lambda module, inputs: seen.append(threading.get_ident())
    )
    return seen, hook.remove


def test_a_text_that_is_kept_is_the_same_and_costs_nothing(
    loaded: LoadedPipeline, params: JobParameters
) -> None:
    params = params.model_copy(update={**GUIDED, "prompt": "red " * 40})
    seen, stop = _calls(loaded)
    fresh, kept = encode_text(loaded, params), encode_text(loaded, params)
    stop()
    assert len(seen) == 1  # one pass for both
    assert torch.equal(fresh.positive, kept.positive)
    assert fresh.negative is not None
    assert kept.negative is not None
    assert torch.equal(fresh.negative, kept.negative)
    assert fresh.warnings == kept.warnings
    assert len(fresh.warnings) == 2


@pytest.mark.parametrize("prompt", ["red", "red " * WORDS], ids=["short", "full"])
@pytest.mark.parametrize("negative", ["", "a black square " * 9], ids=["empty", "full"])
def test_a_text_is_the_same_whatever_is_encoded_beside_it(
    loaded: LoadedPipeline, params: JobParameters, prompt: str, negative: str
) -> None:
    guided = params.model_copy(update={**GUIDED, "prompt": prompt, "negative_prompt": negative})
    both = encode_text(loaded, guided)
    loaded.texts.clear()
    for text, embedding in ((prompt, both.positive), (negative, both.negative)):
        alone = encode_text(loaded, params.model_copy(update={"prompt": text}))
        assert embedding is not None
        assert torch.equal(embedding, alone.positive)


def test_the_warning_of_a_kept_text_names_the_field_and_the_scale_of_this_job(
    loaded: LoadedPipeline, params: JobParameters
) -> None:
    long = "red " * 40
    encode_text(loaded, params.model_copy(update={"prompt": long}))
    guided = params.model_copy(update={"guidance_scale": 2.0, "negative_prompt": long})
    (warning,) = encode_text(loaded, guided).warnings
    assert warning.startswith("negative_prompt: ")
    unguided = params.model_copy(update={"guidance_scale": 0.5, "negative_prompt": long})
    assert encode_text(loaded, unguided).warnings == (
        "negative_prompt has no effect: guidance_scale 0.5 is not above 1",
    )


def test_no_job_can_change_what_is_kept(loaded: LoadedPipeline, params: JobParameters) -> None:
    first = encode_text(loaded, params).positive
    before = first.clone()
    first.zero_()
    assert torch.equal(encode_text(loaded, params).positive, before)


def test_encoding_ahead_leaves_nothing_to_encode(loaded: LoadedPipeline, params: JobParameters) -> None:
    params = params.model_copy(update=GUIDED)
    fresh = encode_text(loaded, params)
    loaded.texts.clear()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(encode_ahead, loaded, params).result()
    seen, stop = _calls(loaded)
    kept = encode_text(loaded, params)
    stop()
    assert seen == []
    assert torch.equal(kept.positive, fresh.positive)
    assert kept.warnings == fresh.warnings
    assert not kept.positive.requires_grad


def test_many_threads_encode_and_tokenize_at_once(loaded: LoadedPipeline, params: JobParameters) -> None:
    """Unguarded, one thread's truncation is another's, and this fails."""
    jobs = [params.model_copy(update={"prompt": f"a red circle {'up ' * n}"}) for n in range(60)]
    expected = [encode_text(loaded, job) for job in jobs]
    loaded.texts.clear()
    with ThreadPoolExecutor(6) as pool:
        ahead = [pool.submit(encode_ahead, loaded, job) for job in reversed(jobs)]
        texts = list(pool.map(lambda job: encode_text(loaded, job), jobs))
        for each in ahead:
            each.result()
    for text, wanted in zip(texts, expected, strict=True):
        assert torch.equal(text.positive, wanted.positive)
        assert text.warnings == wanted.warnings


def test_a_job_that_encodes_ahead_of_another_does_not_change_it(
    loaded: LoadedPipeline, params: JobParameters, tmp_path: Path
) -> None:
    """The next jobs' texts are encoded all the time while one runs; its file is the one it makes alone."""
    alone, _ = finished(loaded, params, tmp_path / "alone.mp4")
    end = threading.Event()

    def keep_encoding() -> int:
        count = 0
        while not end.is_set():
            count += 1
            encode_ahead(loaded, params.model_copy(update={"prompt": f"blue {count}"}))
        return count

    with ThreadPoolExecutor(1) as pool:
        encoded = pool.submit(keep_encoding)
        try:
            beside, _ = finished(loaded, params, tmp_path / "beside.mp4")
        finally:
            end.set()
        assert encoded.result() > 1
    assert beside.file.sha256 == alone.file.sha256


def test_the_cancel_of_a_job_does_not_stop_what_is_encoded_ahead(
    loaded: LoadedPipeline, params: JobParameters
) -> None:
    flag = CancelFlag(lambda: True)
    modules = loaded.family.cancel_modules(loaded.pipe)
    with checked_inside(modules, loaded.device, flag), ThreadPoolExecutor(1) as pool:
        pool.submit(encode_ahead, loaded, params).result()
        with pytest.raises(JobCancelledError):
            encode_text(loaded, params.model_copy(update={"prompt": "another"}))
    assert len(loaded.texts) == 1


def test_a_job_that_waits_for_another_thread_can_be_cancelled(
    loaded: LoadedPipeline, params: JobParameters
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold(module: nn.Module, inputs: object) -> None:
        inside.set()
        go_on.wait(10)

    hook = loaded.pipe.text_encoder.register_forward_pre_hook(hold)
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(encode_ahead, loaded, params)
        assert inside.wait(10)
        with pytest.raises(JobCancelledError):
            encode_text(loaded, params, while_waiting=CancelFlag(lambda: True).check)
        go_on.set()
        ahead.result()
    hook.remove()
