"""Classifier-free guidance on two halves of the ranks, each of which computes one of a step's two passes.

Knows: the order in which a Diffusers pipeline calls its transformer, as ``guidance`` does. Does not know:
how a half computes its pass.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attention import RankGroup
from pipelines.instance_forward import replaced_forward


@contextlib.contextmanager
def split_guidance(transformers: Sequence[nn.Module], partners: RankGroup) -> Iterator[None]:
    """Within the block, calls come in twos, of which this rank computes one and is sent the other.

    ``partners``: two ranks; rank 0 computes the first call, the one with the prompt.
    """
    step = _Step(partners)
    with contextlib.ExitStack() as stack:
        for transformer in transformers:
            stack.enter_context(replaced_forward(transformer, lambda forward: partial(step, forward)))
        yield


class _Step:
    """The two calls of a step, which are of the same transformer."""

    def __init__(self, partners: RankGroup) -> None:
        self._partners = partners
        self._first: Tensor | None = None

    def __call__(
        self, forward: Callable[..., Any], *, hidden_states: Tensor, return_dict: bool, **rest: Any
    ) -> tuple[Tensor]:
        if return_dict:
            raise ValueError("split guidance answers with a tuple only (return_dict=False)")
        call = partial(forward, hidden_states=hidden_states, return_dict=False, **rest)
        if self._first is None:
            # The pipeline only reads the first result when it has the second, so that a place for it will do.
            self._first = call()[0] if self._partners.rank == 0 else torch.empty_like(hidden_states)
            return (self._first,)
        first, self._first = self._first, None
        if self._partners.rank == 0:
            return (self._partners.gather(first).wait()[1],)
        second = call()[0]
        if (second.shape, second.dtype) != (first.shape, first.dtype):
            raise RuntimeError(
                f"the transformer turns {first.dtype} {tuple(first.shape)} into {second.dtype} "
                f"{tuple(second.shape)}; split guidance needs the same"
            )
        first.copy_(self._partners.gather(second).wait()[0])
        return (second,)
