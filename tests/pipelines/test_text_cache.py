"""The cache itself: what it keeps, what it drops, and whose turn it is."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pipelines.text_cache import EncodedPrompt, TextCache


class _Encoder:
    """Counts what is encoded; the embedding holds the text's length and limit."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, texts: Sequence[str], limit: int) -> list[EncodedPrompt]:
        self.calls.append(list(texts))
        return [
            EncodedPrompt(torch.full((1, 2, 3), float(len(text) + limit)), text[limit:] or None)
            for text in texts
        ]

    @property
    def texts(self) -> list[str]:
        return [text for call in self.calls for text in call]


def get(cache: TextCache, encode: _Encoder, text: str, limit: int = 8) -> EncodedPrompt:
    """One text."""
    (prompt,) = cache.get([text], limit, encode, _nothing)
    return prompt


def _nothing() -> None:
    """While waiting."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_is_bit_for_bit_what_was_encoded(dtype: torch.dtype) -> None:
    cache = TextCache()
    embedding = torch.randn(1, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    for _ in range(2):
        (prompt,) = cache.get(["a"], 8, lambda texts, limit: [EncodedPrompt(embedding, "cut")], _nothing)
        assert prompt.embedding.dtype == dtype
        assert torch.equal(prompt.embedding, embedding)
        assert prompt.cut == "cut"


def test_the_least_recently_used_goes_first() -> None:
    cache, encode = TextCache(entries=2), _Encoder()
    for text in ("a", "b", "a", "c", "a", "b"):
        get(cache, encode, text)
    assert encode.texts == ["a", "b", "c", "b"]
    assert len(cache) == 2


def test_those_that_are_missing_are_encoded_at_once_and_each_of_them_once() -> None:
    cache, encode = TextCache(entries=3), _Encoder()
    get(cache, encode, "a")
    found = cache.get(["bb", "a", "ccc", "bb"], 8, encode, _nothing)
    assert [prompt.embedding[0, 0, 0] for prompt in found] == [10, 9, 11, 10]
    assert encode.calls == [["a"], ["bb", "ccc"]]
    get(cache, encode, "d")
    get(cache, encode, "a")  # the least recently used of the three when "d" came
    assert encode.texts == ["a", "bb", "ccc", "d", "a"]


def test_more_texts_than_are_kept_are_all_there() -> None:
    cache, encode = TextCache(entries=1), _Encoder()
    get(cache, encode, "a")
    found = cache.get(["a", "bb", "ccc"], 8, encode, _nothing)
    assert [prompt.embedding[0, 0, 0] for prompt in found] == [9, 10, 11]
    assert len(cache) == 1


def test_another_limit_is_another_text() -> None:
    cache, encode = TextCache(), _Encoder()
    cuts = [get(cache, encode, "abc", limit).cut for limit in (1, 2, 3, 1)]
    assert cuts == ["bc", "c", None, "bc"]
    assert len(encode.texts) == 3


def test_a_failure_is_not_kept_and_blocks_nobody() -> None:
    cache = TextCache()

    def fail(texts: Sequence[str], limit: int) -> list[EncodedPrompt]:
        raise MemoryError

    with pytest.raises(MemoryError):
        cache.get(["a"], 8, fail, _nothing)
    assert len(cache) == 0
    assert get(cache, _Encoder(), "a").embedding[0, 0, 0] == 9


def test_two_threads_that_want_the_same_text_encode_it_once() -> None:
    cache, encode = TextCache(), _Encoder()
    start = threading.Barrier(8)

    def want() -> float:
        start.wait()
        return float(get(cache, encode, "abc").embedding[0, 0, 0])

    with ThreadPoolExecutor(8) as pool:
        found = [each.result() for each in [pool.submit(want) for _ in range(8)]]
    assert found == [11.0] * 8
    assert encode.texts == ["abc"]


def test_after_a_clear_everything_is_encoded_again() -> None:
    cache, encode = TextCache(), _Encoder()
    get(cache, encode, "a")
    cache.clear()
    assert len(cache) == 0
    get(cache, encode, "a")
    assert encode.texts == ["a", "a"]
