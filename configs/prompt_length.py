"""Which words of a prompt lie beyond what a model reads, from its tokenizer file alone: no torch, no device.

Knows: the tokenizer of a preset, and how the family cleans a prompt before it. Does not know: embeddings. For
the HTTP API: ``cut_words(preset, "prompt", text)``; the worker says the same of a job that ran.
"""

import functools
import html
import re
from collections.abc import Sequence
from pathlib import Path

import ftfy
from tokenizers import Tokenizer

from configs.model_preset import ModelPreset

TOKENIZER_FILE = "tokenizer/tokenizer.json"


class TokenizerNotFoundError(ValueError):
    """The model's tokenizer is not on this machine (yet): nothing can be said of the prompt's length."""


def cut_words(preset: ModelPreset, field: str, text: str) -> str | None:
    """Say how many tokens of the text are used and which words are cut, or None if all of it is used.

    The first call for a model reads its tokenizer, a file of up to some 20 MB. Nothing is downloaded.

    Raises:
        TokenizerNotFoundError: the tokenizer's file is not there, or cannot be read.
    """
    cut = what_is_cut(*_tokens(preset, text), preset.max_sequence_length)
    return None if cut is None else f"{field}: {cut}"


def cut_text(preset: ModelPreset, text: str) -> str:
    """The part of a text that the model does not read; empty if it reads all of it.

    Raises:
        TokenizerNotFoundError: as ``cut_words``.
    """
    cleaned, spans, special = _tokens(preset, text)
    if len(spans) + special <= preset.max_sequence_length:
        return ""
    return cleaned[spans[max(0, preset.max_sequence_length - special)][0] :].strip()


def _tokens(preset: ModelPreset, text: str) -> tuple[str, list[tuple[int, int]], int]:
    """The cleaned text, the character ranges of its tokens, and the number of tokens that are added."""
    cleaned = clean_prompt(text)
    encoded = _tokenizer(tokenizer_file(preset)).encode(cleaned)
    marks = encoded.special_tokens_mask
    spans = [span for span, mark in zip(encoded.offsets, marks, strict=True) if not mark]
    return cleaned, spans, len(encoded.ids) - len(spans)


def what_is_cut(cleaned: str, spans: Sequence[tuple[int, int]], special: int, limit: int) -> str | None:
    """The sentence on what of a cleaned text does not fit into ``limit`` tokens, or None.

    ``spans`` are the character ranges of its tokens, ``special`` the number of tokens that are always added.
    """
    if len(spans) + special <= limit:
        return None
    kept = max(0, limit - special)
    return f"{kept} of {len(spans)} text tokens are used; cut: {cleaned[spans[kept][0] :].strip()!r}"


def clean_prompt(text: str) -> str:
    """What a Wan pipeline makes of a prompt: repaired, unescaped, white space squeezed."""
    repaired = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", repaired.strip()).strip()


def tokenizer_file(preset: ModelPreset) -> Path:
    """Where the preset's tokenizer lies: in its folder, or in the hub's cache once the model was loaded.

    Raises:
        TokenizerNotFoundError: it is in neither.
    """
    if preset.folder is not None:
        path = preset.folder / TOKENIZER_FILE
        if path.is_file():
            return path
        raise TokenizerNotFoundError(f"model {preset.name}: {path} is missing")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(preset.source, TOKENIZER_FILE, revision=preset.revision)
    except HFValidationError as error:
        raise TokenizerNotFoundError(f"model {preset.name}: {error}") from error
    if isinstance(found, str):
        return Path(found)
    raise TokenizerNotFoundError(
        f"model {preset.name}: the tokenizer of {preset.source} is not in the hub's cache"
    )


@functools.lru_cache(maxsize=2)
def _tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise TokenizerNotFoundError(f"{path} is no tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
