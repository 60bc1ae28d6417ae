"""Runs a transformer's feed-forward layers in slices of tokens, which need only a part of its memory.

Knows: Diffusers' ``FeedForward``. Does not know: families, jobs, or how many slices are good. Each token goes
through the layer by itself, so the slices' results are those of the whole. Diffusers' own chunking is in few
of its blocks, and only takes sizes that divide the tokens.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from diffusers.models.attention import FeedForward
from torch import nn

from pipelines.instance_forward import replaced_forward


@contextlib.contextmanager
def sliced_feed_forward(transformers: Sequence[nn.Module], chunks: int) -> Iterator[None]:
    """Within the block, every ``FeedForward`` of these modules runs in so many slices of dimension 1.

    The number of slices, not their size, is fixed, so that one compiled graph serves clips of any length.

    Raises:
        ValueError: ``chunks`` below 1.
    """
    if chunks < 1:
        raise ValueError(f"feed_forward_chunks is {chunks}; at least 1 slice is needed")
    layers = [
        module
        for transformer in transformers
        for module in transformer.modules()
        if isinstance(module, FeedForward) and chunks > 1
    ]
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced_forward(layer, lambda forward: partial(_in_slices, forward, chunks)))
        yield


def _in_slices(
    forward: Callable[[torch.Tensor], torch.Tensor], chunks: int, hidden_states: torch.Tensor
) -> torch.Tensor:
    """Hidden states [batch, tokens, channels] or [tokens, channels] -> the same shape."""
    dim = hidden_states.ndim - 2
    tokens = hidden_states.shape[dim]
    size = (tokens + chunks - 1) // chunks
    slices = [
        forward(hidden_states.narrow(dim, start, min(size, tokens - start)))
        for start in (size * index for index in range(chunks))
        if start < tokens
    ]
    return torch.cat(slices, dim)
