"""Which words of a prompt the text encoder would not see, without loading the model.

Knows: the tokenizer file beside the weights, and how Wan pipelines clean a prompt before they cut it. Does
not know: torch. What a job really cut is in its warnings (pipelines/text.py).
"""

import html
import re
from functools import lru_cache
from pathlib import Path

import ftfy
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer

from configs.model_preset import ModelPreset

FILE = "tokenizer/tokenizer.json"


def cut_words(preset: ModelPreset, text: str) -> list[str] | None:
    """The words beyond the model's limit, or None if its tokenizer is not on this machine."""
    path = _tokenizer_file(preset)
    tokenizer = None if path is None else _load(path)
    if tokenizer is None:
        return None
    cleaned = _clean(text)
    tokens = tokenizer.encode(cleaned, add_special_tokens=True)
    spans = [span for span, mark in zip(tokens.offsets, tokens.special_tokens_mask, strict=True) if not mark]
    special = len(tokens.ids) - len(spans)
    if len(tokens.ids) <= preset.max_sequence_length:
        return []
    kept = max(0, preset.max_sequence_length - special)
    return cleaned[spans[kept][0] :].split()


def _tokenizer_file(preset: ModelPreset) -> Path | None:
    if preset.folder is not None:
        path = preset.folder / FILE
        return path if path.is_file() else None
    try:
        found = try_to_load_from_cache(preset.source, FILE, revision=preset.revision)
    except ValueError:  # no hub id
        return None
    return Path(found) if isinstance(found, str) else None


@lru_cache(maxsize=2)
def _load(path: Path) -> Tokenizer | None:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # the library has no narrower one; the worker says what is wrong with the folder
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _clean(text: str) -> str:
    repaired = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return re.sub(r"\s+", " ", repaired).strip()
