"""Runs a transformer's feed-forward layers in slices of tokens, which need only a part of its memory.

Knows: Diffusers' ``FeedForward``. Does not know: families, jobs, or how many slices are good. Each token goes
through the layer by itself, so the slices' results are those of the whole. Diffusers' own chunking is in few
of its blocks, and only takes sizes that divide the tokens.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers.models.attention import FeedForward
from torch import nn


@contextlib.contextmanager
def sliced_feed_forward(transformers: Sequence[nn.Module], chunks: int) -> Iterator[None]:
    """Within the block, every ``FeedForward`` of these modules runs in so many slices of dimension 1.

    The number of slices, not their size, is fixed, so that one compiled graph serves clips of any length.

    Raises:
        ValueError: ``chunks`` below 1.
    """
    if chunks < 1:
        raise ValueError(f"feed_forward_chunks is {chunks}; at least 1 slice is needed")
    layers: list[Any] = [
        module
        for transformer in transformers
        for module in transformer.modules()
        if type(module) is FeedForward and chunks > 1
    ]
    try:
        for layer in layers:
            # Not another forward of this one object, for which each layer of each job would compile anew.
            layer.__class__ = SlicedFeedForward
            layer.chunks = chunks
        yield
    finally:
        for layer in layers:
            layer.__class__ = FeedForward
            vars(layer).pop("chunks", None)


class SlicedFeedForward(FeedForward):  # type: ignore[misc]  # Diffusers has no types
    """What such a layer is within the block."""

    chunks: int

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states [batch, tokens, channels] or [tokens, channels] -> the same shape."""
        dim = hidden_states.ndim - 2
        tokens = hidden_states.shape[dim]
        size = (tokens + self.chunks - 1) // self.chunks
        slices = [
            super(SlicedFeedForward, self).forward(
                hidden_states.narrow(dim, start, min(size, tokens - start))
            )
            for start in (size * index for index in range(self.chunks))
            if start < tokens
        ]
        return torch.cat(slices, dim)
