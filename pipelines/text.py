"""The text_encode stage: prompts to embeddings, and what of them did not fit.

Knows: the tokenizer's limit and which words lie beyond it. Does not know: how the embeddings are used.
"""

from dataclasses import dataclass
from typing import Any

import torch

from configs.job import JobParameters
from pipelines.loading import LoadedPipeline


@dataclass(frozen=True)
class EncodedText:
    """Embeddings [1, tokens, text_dim]; ``negative`` is None when one pass without guidance is enough."""

    positive: torch.Tensor
    negative: torch.Tensor | None
    warnings: tuple[str, ...]


def uses_guidance(params: JobParameters) -> bool:
    """Whether each step runs a second pass on the negative prompt."""
    return params.guidance_scale > 1


def encode_text(loaded: LoadedPipeline, params: JobParameters) -> EncodedText:
    """Encode the prompt, and the negative prompt where guidance uses it."""
    limit, warnings = loaded.preset.max_sequence_length, []
    texts = {"prompt": params.prompt}
    if uses_guidance(params):
        texts["negative_prompt"] = params.negative_prompt
    elif params.negative_prompt:
        warnings.append(
            f"negative_prompt has no effect: guidance_scale {params.guidance_scale:g} is not above 1"
        )
    for field, text in texts.items():
        warning = cut_warning(loaded, field, text)
        if warning is not None:
            warnings.append(warning)
    positive, negative = loaded.family.encode_prompts(
        loaded.pipe, params.prompt, texts.get("negative_prompt"), limit
    )
    return EncodedText(positive, negative, tuple(warnings))


def cut_warning(loaded: LoadedPipeline, field: str, text: str) -> str | None:
    """Say how many tokens of the text are used and which words are cut, or None if all of it is used."""
    limit = loaded.preset.max_sequence_length
    cleaned = loaded.family.clean_prompt(text)
    tokens = _tokenize(loaded.pipe.tokenizer, cleaned)
    if len(tokens.spans) + tokens.special <= limit:
        return None
    kept = max(0, limit - tokens.special)
    cut = cleaned[tokens.spans[kept][0] :].strip()
    return f"{field}: {kept} of {len(tokens.spans)} text tokens are used; cut: {cut!r}"


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
