"""Runs a transformer's feed-forward layers in slices of tokens, which need only a part of its memory.

Knows: Diffusers' ``FeedForward``. Does not know: families, jobs, or how many slices are good. Each token goes
through the layer by itself, so the slices' results are those of the whole. Diffusers' own chunking is in few
of its blocks, and only takes sizes that divide the tokens.

Layers with GELU by tanh become one operator, also for one slice: GELU is computed as the first product is
stored (in fp8, as it is quantised), and every slice goes straight into the result.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from pipelines.fp8 import Fp8Linear, multiply, quantise_gelu, quantise_rows
from pipelines.joined_attention import has_hooks

# The numbers that the epilogue of a GPU's matrix product takes.
_SHORT = (torch.bfloat16, torch.float16)
_ALIGNED_ROWS = 16


@contextlib.contextmanager
def sliced_feed_forward(transformers: Sequence[nn.Module], chunks: int) -> Iterator[None]:
    """Within the block, every ``FeedForward`` of these modules runs in so many slices of its tokens.

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
        if type(module) is FeedForward
    ]
    try:
        for layer in layers:
            kind = _class_for(layer)
            if kind is SlicedFeedForward and chunks == 1:
                continue
            # Not another forward of this one object, for which each layer of each job would compile anew.
            layer.__class__ = kind
            layer.chunks = chunks
        yield
    finally:
        for layer in layers:
            layer.__class__ = FeedForward
            vars(layer).pop("chunks", None)


class SlicedFeedForward(FeedForward):  # type: ignore[misc]  # Diffusers has no types
    """What such a layer is within the block."""

    chunks: int

    def forward(self, hidden_states: Tensor) -> Tensor:
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


class OneOperator(SlicedFeedForward):
    """Of layers with GELU by tanh: a single operator in a graph."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As above."""
        first, second = self.net[0].proj, self.net[2]
        # Eager, an operator of ours would only hide from tools what runs inside it.
        run = _operator if torch.compiler.is_compiling() else _sliced
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = run(rows, first.weight, first.bias, second.weight, second.bias, self.chunks)
        return out.view(*hidden_states.shape[:-1], out.shape[-1])

    def forward_over(self, hidden_states: Tensor) -> Tensor:
        """The same, written over what comes in, which is dense and needed no longer."""
        first, second = self.net[0].proj, self.net[2]
        run = _operator_over if torch.compiler.is_compiling() else _sliced_over
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        run(rows, first.weight, first.bias, second.weight, second.bias, self.chunks)
        return hidden_states


class OneFp8Operator(SlicedFeedForward):
    """The same of layers in fp8. What comes in is quantised outside, by what has made it."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As above."""
        rows, scale = quantise_rows(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return self.forward_rows(rows.view(hidden_states.shape), scale)

    def forward_rows(self, rows: Tensor, scale: Tensor) -> Tensor:
        """The same of rows e4m3 [..., channels] that are quantised, with scales [n, 1]."""
        first, second = self.net[0].proj, self.net[2]
        run = _fp8_operator if torch.compiler.is_compiling() else _sliced_fp8
        out = run(
            rows.view(-1, rows.shape[-1]),
            scale,
            first.weight,
            first.weight_scale,
            first.bias,
            second.weight,
            second.weight_scale,
            second.bias,
            self.chunks,
        )
        return out.view(*rows.shape[:-1], out.shape[-1])


def _class_for(layer: Any) -> type[SlicedFeedForward]:
    net = layer.net
    if type(net[0]) is not GELU or net[0].approximate != "tanh":
        return SlicedFeedForward
    first, second = net[0].proj, net[2]
    dropouts = [net[1], *net[3:]]
    if any(type(each) is not nn.Dropout or (each.training and each.p) for each in dropouts):
        return SlicedFeedForward
    if any(has_hooks(each) for each in (net[0], first, second, *dropouts)):
        return SlicedFeedForward
    kinds = type(first), type(second)
    if kinds == (Fp8Linear, Fp8Linear):
        return OneFp8Operator
    if kinds != (nn.Linear, nn.Linear) or first.bias is None or second.bias is None:
        return SlicedFeedForward
    return OneOperator


def _slices(rows: int, chunks: int) -> Iterator[slice]:
    # Matrix products in fp8 want the scales of their rows from a multiple of 16 bytes on.
    size = max(_ALIGNED_ROWS, -(-rows // (chunks * _ALIGNED_ROWS)) * _ALIGNED_ROWS)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if x.is_cuda and x.dtype in _SHORT:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return gelu(linear(x, weight, bias), approximate="tanh")


def _sliced(x: Tensor, weight: Tensor, bias: Tensor, weight_2: Tensor, bias_2: Tensor, chunks: int) -> Tensor:
    """x [rows, channels], weights [out, in] and biases of both layers -> [rows, channels]."""
    if chunks == 1:
        return linear(_linear_gelu(x, weight, bias), weight_2, bias_2)
    out = x.new_empty(x.shape[0], weight_2.shape[0])
    for part in _slices(x.shape[0], chunks):
        hidden = _linear_gelu(x[part], weight, bias)
        torch.addmm(bias_2, hidden, weight_2.t(), out=out[part])
        del hidden  # before the next one is made
    return out


def _sliced_over(
    x: Tensor, weight: Tensor, bias: Tensor, weight_2: Tensor, bias_2: Tensor, chunks: int
) -> None:
    """The same, written over x: a slice's rows are read before they are written."""
    for part in _slices(x.shape[0], chunks):
        hidden = _linear_gelu(x[part], weight, bias)
        torch.addmm(bias_2, hidden, weight_2.t(), out=x[part])
        del hidden


def _sliced_fp8(
    rows: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    weight_2: Tensor,
    weight_2_scale: Tensor,
    bias_2: Tensor | None,
    chunks: int,
) -> Tensor:
    """Quantised rows [rows, channels], their scales and those of both layers -> bfloat16 [rows, channels]."""
    out = torch.empty(rows.shape[0], weight_2.shape[0], dtype=torch.bfloat16, device=rows.device)
    for part in _slices(rows.shape[0], chunks):
        hidden, hidden_scale = quantise_gelu(multiply(rows[part], scale[part], weight, weight_scale, bias))
        multiply(hidden, hidden_scale, weight_2, weight_2_scale, bias_2, out=out[part])
        del hidden
    return out


_operator = torch.library.custom_op("reelwright::feed_forward", _sliced, mutates_args=())
_operator_over = torch.library.custom_op("reelwright::feed_forward_", _sliced_over, mutates_args=("x",))
_fp8_operator = torch.library.custom_op("reelwright::feed_forward_fp8", _sliced_fp8, mutates_args=())


@_operator.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, weight_2: Tensor, bias_2: Tensor, chunks: int) -> Tensor:
    return x.new_empty(x.shape[0], weight_2.shape[0])


@_fp8_operator.register_fake
def _(
    rows: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    weight_2: Tensor,
    weight_2_scale: Tensor,
    bias_2: Tensor | None,
    chunks: int,
) -> Tensor:
    return torch.empty(rows.shape[0], weight_2.shape[0], dtype=torch.bfloat16, device=rows.device)
