"""The text_encode stage: prompts to embeddings, and what of them did not fit.

Knows: the tokenizer's limit and which words lie beyond it. Does not know: how the embeddings are used.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from configs.job import JobParameters
from configs.prompt_length import what_is_cut
from pipelines.loading import LoadedPipeline
from pipelines.placement import TEXT_ENCODER, NoRoomError
from pipelines.rows_apart import rows_apart
from pipelines.text_cache import EncodedPrompt


@dataclass(frozen=True)
class EncodedText:
    """Embeddings [1, tokens, text_dim]; ``negative`` is None when one pass without guidance is enough."""

    positive: torch.Tensor
    negative: torch.Tensor | None
    warnings: tuple[str, ...]


def uses_guidance(params: JobParameters) -> bool:
    """Whether each step runs a second pass on the negative prompt."""
    return params.guidance_scale > 1


def _nothing() -> None:
    """While waiting."""


def encode_text(
    loaded: LoadedPipeline, params: JobParameters, *, while_waiting: Callable[[], None] = _nothing
) -> EncodedText:
    """Encode the prompt, and the negative prompt where guidance uses it, or find them encoded already.

    ``while_waiting`` is called now and then while ``encode_ahead`` encodes in another thread; a job that is
    cancelled meanwhile raises from it.
    """
    warnings = []
    if params.negative_prompt and not uses_guidance(params):
        warnings.append(
            f"negative_prompt has no effect: guidance_scale {params.guidance_scale:g} is not above 1"
        )
    embeddings: list[torch.Tensor] = []
    texts = _texts(params)
    for field, prompt in zip(texts, _encoded(loaded, texts.values(), while_waiting), strict=True):
        embeddings.append(prompt.embedding.to(loaded.device))
        if prompt.cut is not None:
            warnings.append(f"{field}: {prompt.cut}")
    return EncodedText(embeddings[0], embeddings[1] if uses_guidance(params) else None, tuple(warnings))


def encode_ahead(loaded: LoadedPipeline, params: JobParameters) -> None:
    """Encode a later job's texts, so that its ``encode_text`` finds them.

    May be called from any thread while a job runs on the same pipeline. Where its offload level leaves no
    room for the text encoder beside what runs, nothing is encoded; the later job then does it by itself.
    """
    with contextlib.suppress(NoRoomError):
        _encoded(loaded, _texts(params).values(), _nothing, ahead=True)


def cut_warning(loaded: LoadedPipeline, field: str, text: str) -> str | None:
    """Say how many tokens of the text are used and which words are cut, or None if all of it is used."""
    cut = _cut(loaded, text, loaded.preset.max_sequence_length)
    return None if cut is None else f"{field}: {cut}"


def _texts(params: JobParameters) -> dict[str, str]:
    texts = {"prompt": params.prompt}
    if uses_guidance(params):
        texts["negative_prompt"] = params.negative_prompt
    return texts


def _encoded(
    loaded: LoadedPipeline, texts: Iterable[str], while_waiting: Callable[[], None], *, ahead: bool = False
) -> list[EncodedPrompt]:
    def encode(texts: Sequence[str], limit: int) -> list[EncodedPrompt]:
        blocks = loaded.placement.blocks(TEXT_ENCODER)
        # An encoder that comes block by block comes once for all, and each text is what it is alone.
        with _current(loaded.device), loaded.placement.encoding(ahead=ahead), rows_apart(blocks):
            embeddings = loaded.family.encode_texts(loaded.pipe, texts, limit)
        return [
            EncodedPrompt(embedding, _cut(loaded, text, limit))
            for embedding, text in zip(embeddings.split(1), texts, strict=True)
        ]

    with torch.no_grad():
        return loaded.texts.get(list(texts), loaded.preset.max_sequence_length, encode, while_waiting)


def _cut(loaded: LoadedPipeline, text: str, limit: int) -> str | None:
    cleaned = loaded.family.clean_prompt(text)
    tokens = _tokenize(loaded.pipe.tokenizer, cleaned)
    return what_is_cut(cleaned, tokens.spans, tokens.special, limit)


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@dataclass(frozen=True)
class _Tokens:
    """Character ranges of the tokens of a text, and the number of tokens that the tokenizer adds."""

    spans: list[tuple[int, int]]
    special: int


def _tokenize(tokenizer: Any, text: str) -> _Tokens:
    encoded = tokenizer(
        text,
        add_special_tokens=True,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,
    )
    marks = encoded["special_tokens_mask"]
    spans = [span for span, mark in zip(encoded["offset_mapping"], marks, strict=True) if not mark]
    return _Tokens(spans, sum(marks))
