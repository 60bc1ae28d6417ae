"""Encoded texts of a model, the last few used.

Knows: that one thread at a time may encode, since fast tokenizers are not made for two. Does not know: how a
text is encoded. Embeddings are kept as bytes in host memory, so no job can change them: 16 texts of 512
tokens of width 4096 in bfloat16 (Wan) are 67 MB, which a GPU has better uses for.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

ENTRIES = 16
# How often a job that waits for another thread's encoding looks whether it is cancelled.
WAIT_SECONDS = 0.1


@dataclass(frozen=True)
class EncodedPrompt:
    """One text: embedding [1, tokens, text_dim], and what of the text did not fit (None: all of it did)."""

    embedding: torch.Tensor
    cut: str | None


@dataclass(frozen=True)
class _Kept:
    data: bytes
    dtype: torch.dtype
    shape: torch.Size
    cut: str | None

    @classmethod
    def of(cls, prompt: EncodedPrompt) -> Self:
        tensor = prompt.embedding.detach().cpu().contiguous()
        data = tensor.view(torch.uint8).numpy().tobytes()
        return cls(data, tensor.dtype, tensor.shape, prompt.cut)

    def prompt(self) -> EncodedPrompt:
        embedding = torch.frombuffer(bytearray(self.data), dtype=self.dtype).view(self.shape)
        return EncodedPrompt(embedding, self.cut)


class TextCache:
    """The last texts encoded, least recently used first. All methods may be called from any thread."""

    def __init__(self, entries: int = ENTRIES) -> None:
        self._entries = entries
        self._encoding = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], _Kept] = OrderedDict()

    def get(
        self,
        texts: Sequence[str],
        limit: int,
        encode: Callable[[Sequence[str], int], Sequence[EncodedPrompt]],
        while_waiting: Callable[[], None],
    ) -> list[EncodedPrompt]:
        """The texts, each cut to ``limit`` tokens; on the host. Those not kept are encoded now, all at once.

        ``while_waiting`` is called again and again while another thread encodes; what it raises ends the
        wait. If ``encode`` raises, nothing is kept.
        """
        while not self._encoding.acquire(timeout=WAIT_SECONDS):
            while_waiting()
        try:
            found = {text: self._kept[text, limit] for text in texts if (text, limit) in self._kept}
            if missing := [text for text in dict.fromkeys(texts) if text not in found]:
                encoded = encode(missing, limit)
                found |= {text: _Kept.of(each) for text, each in zip(missing, encoded, strict=True)}
            for text in texts:
                self._kept[text, limit] = found[text]
                self._kept.move_to_end((text, limit))
            while len(self._kept) > self._entries:
                self._kept.popitem(last=False)
            return [found[text].prompt() for text in texts]
        finally:
            self._encoding.release()

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Forget all texts, as after another text encoder was put in."""
        with self._encoding:
            self._kept.clear()
