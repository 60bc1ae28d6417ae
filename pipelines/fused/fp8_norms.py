"""The norms of ``norms`` for products in fp8: quantised as they are computed, never stored in 16 bits.

Knows: the same, and how rows are quantised. Does not know: layers. Each operator gives the norm in e4m3
[batch, tokens, channels] and float32 [batch * tokens, 1] that its rows are to be multiplied by: what
``quantise_rows`` makes of the norm rounded to the dtype of the hidden states.
"""

import torch
from torch import Tensor

from pipelines.fp8 import FORMAT, quantise_rows
from pipelines.fused.norms import launch, reference_add, reference_norm, takes


@torch.library.custom_op("reelwright::quantised", mutates_args=())
def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [batch, tokens, channels] itself: by one kernel also in a graph, where nothing it came from fuses."""
    return _quantised(x)


@torch.library.custom_op("reelwright::fused_norm_fp8", mutates_args=())
def norm_fp8(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: Tensor | None,
    table: Tensor | None,
    shift: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """``norm``, quantised."""
    if takes(x, weight, bias, modulation, table):
        rows, scale = _unset_rows(x)
        launch(x, None, None, rows, weight, bias, modulation, table, -1, shift, eps, scale)
        return rows, scale
    return _quantised(reference_norm(x, weight, bias, modulation, table, shift, eps))


@torch.library.custom_op("reelwright::fused_add_norm_fp8", mutates_args=())
def add_norm_fp8(
    hidden: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: Tensor | None,
    table: Tensor | None,
    gate: int,
    shift: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``add_norm``: the sum, and its norm quantised."""
    if takes(hidden, x, weight, bias, modulation, table):
        summed, (rows, scale) = hidden.new_empty(hidden.shape), _unset_rows(hidden)
        launch(x, hidden, summed, rows, weight, bias, modulation, table, gate, shift, eps, scale)
        return summed, rows, scale
    summed = reference_add(hidden, x, modulation, table, gate).contiguous()
    return summed, *_quantised(reference_norm(summed, weight, bias, modulation, table, shift, eps))


@torch.library.custom_op("reelwright::fused_add_norm_fp8_", mutates_args=("hidden",))
def add_norm_fp8_(
    hidden: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: Tensor | None,
    table: Tensor | None,
    gate: int,
    shift: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """``add_norm_``: hidden becomes the sum, and its norm is given quantised."""
    if takes(hidden, x, weight, bias, modulation, table):
        rows, scale = _unset_rows(hidden)
        launch(x, hidden, hidden, rows, weight, bias, modulation, table, gate, shift, eps, scale)
        return rows, scale
    hidden.copy_(reference_add(hidden, x, modulation, table, gate))
    return _quantised(reference_norm(hidden, weight, bias, modulation, table, shift, eps))


@quantised.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return _unset_rows(x)


@norm_fp8.register_fake
def _(x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return _unset_rows(x)


@add_norm_fp8.register_fake
def _(hidden: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), *_unset_rows(hidden)


@add_norm_fp8_.register_fake
def _(hidden: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return _unset_rows(hidden)


def _unset_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(x.shape[0] * x.shape[1], 1, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=FORMAT), scale


def _quantised(normed: Tensor) -> tuple[Tensor, Tensor]:
    rows, scale = quantise_rows(normed.flatten(0, 1))
    return rows.view(normed.shape), scale
