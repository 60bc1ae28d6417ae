"""Classifier-free guidance in one batch instead of two passes.

Knows: the order in which a Diffusers pipeline calls its transformer: with the prompt, then with the negative
prompt. Does not know: models, samplers, or which prompt is which beyond that.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from configs.compute import GuidanceBatching
from pipelines.instance_forward import replaced_forward

BATCH_MOST_TOKENS = 8192
"""Up to so many tokens one pass leaves a GPU partly idle, so that two in a batch may be faster."""


def batches_guidance(mode: GuidanceBatching, tokens: int, device: torch.device) -> bool:
    """Whether both passes of a clip of so many tokens run as one batch."""
    if mode != "auto":
        return mode == "on"
    return device.type == "cuda" and tokens <= BATCH_MOST_TOKENS


@contextlib.contextmanager
def batched_guidance(transformers: Sequence[nn.Module], negative: Tensor) -> Iterator[None]:
    """Within the block, a pass with the prompt also computes the one with ``negative`` that follows it.

    ``negative``: embeddings [1, tokens, text_dim], as the pipeline has them.
    """
    with contextlib.ExitStack() as stack:
        for transformer in transformers:
            stack.enter_context(replaced_forward(transformer, lambda forward: _Both(forward, negative)))
        yield


class _Both:
    """A transformer's forward that answers every second call from the one before."""

    def __init__(self, forward: Callable[..., Any], negative: Tensor) -> None:
        self._forward = forward
        self._negative = negative
        self._answer: Tensor | None = None

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        return_dict: bool,
        **rest: Any,
    ) -> tuple[Tensor]:
        if return_dict:
            raise ValueError("batched guidance answers with a tuple only (return_dict=False)")
        if self._answer is not None:
            answer, self._answer = self._answer, None
            return (answer,)
        negative = self._negative.to(encoder_hidden_states)
        both = self._forward(
            hidden_states=torch.cat([hidden_states, hidden_states]),
            timestep=torch.cat([timestep, timestep]),
            encoder_hidden_states=torch.cat([encoder_hidden_states, negative]),
            return_dict=False,
            **rest,
        )[0]
        positive, self._answer = both.chunk(2)
        return (positive,)
