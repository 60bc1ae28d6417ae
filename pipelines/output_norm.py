"""Wan's last norm and modulation, a single kernel or over slices: no float32 copy of all hidden states.

Knows: the expression at the end of Diffusers' Wan transformer, ``(norm_out(x.float()) * factor +
shift).type_as(x)``. Does not know: jobs. Each token has its norm by itself, so the numbers are the same.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor

from pipelines.fused.norms import norm_now
from pipelines.joined_attention import has_hooks

# Few enough that their float32 copies are small beside the hidden states, enough to fill a GPU.
SLICE_TOKENS = 4096


@contextlib.contextmanager
def sliced_output_norm(transformers: Sequence[Any]) -> Iterator[None]:
    """Within the block, the output norms of these Wan transformers work so; others are left alone."""
    norms: list[Any] = [
        transformer.norm_out
        for transformer in transformers
        if type(transformer) is WanTransformer3DModel
        and type(transformer.norm_out) is FP32LayerNorm
        and not has_hooks(transformer.norm_out)
    ]
    try:
        for norm in norms:
            norm.__class__ = PostponedNorm
        yield
    finally:
        for norm in norms:
            norm.__class__ = FP32LayerNorm


class PostponedNorm(FP32LayerNorm):  # type: ignore[misc]  # Diffusers has no types
    """What such a norm is within the block."""

    def forward(self, inputs: Tensor) -> "Postponed":
        """Nothing yet: the float32 copy ``inputs`` can go."""
        return Postponed(self)

    def now(self, inputs: Tensor) -> Tensor:
        """The norm of float32 inputs."""
        out: Tensor = super().forward(inputs)
        return out


class Postponed:
    """``(norm(x.float()) * factor + shift).type_as(x)``, of which ``x`` comes last."""

    def __init__(
        self, norm: PostponedNorm, factor: Tensor | None = None, shift: Tensor | None = None
    ) -> None:
        self._norm = norm
        self._factor = factor
        self._shift = shift

    def __mul__(self, factor: Tensor) -> "Postponed":
        return Postponed(self._norm, factor)

    def __add__(self, shift: Tensor) -> "Postponed":
        return Postponed(self._norm, self._factor, shift)

    def type_as(self, x: Tensor) -> Tensor:
        """x [batch, tokens, channels] -> the same shape and dtype."""
        if self._factor is None or self._shift is None:
            raise RuntimeError("the output norm of this Diffusers is not modulated as was expected")
        if x.is_cuda and self._factor.shape[1] == self._shift.shape[1] == 1:
            return self._at_once(x, self._factor, self._shift)
        out = torch.empty_like(x)
        tokens = x.shape[1]
        for start in range(0, tokens, SLICE_TOKENS):
            part = slice(start, min(start + SLICE_TOKENS, tokens))
            factor, shift = (_of(each, part) for each in (self._factor, self._shift))
            out[:, part] = self._norm.now(x[:, part].float()) * factor + shift
        return out

    def _at_once(self, x: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
        """The same by the kernel of a block's norms, with one modulation for all tokens."""
        norm = self._norm
        # The kernel adds the 1 again, which gives what it was.
        modulation = torch.stack([shift.float(), factor.float() - 1], dim=2)
        return norm_now(x.contiguous(), norm.weight, norm.bias, modulation, None, 0, norm.eps)


def _of(modulation: Tensor, part: slice) -> Tensor:
    """Modulation of these tokens, or of the whole clip: [batch, tokens or 1, channels]."""
    return modulation if modulation.shape[1] == 1 else modulation[:, part]
