"""Residual and layer norm as single operators: of hidden states [batch, tokens, channels].

Knows: the arithmetic of Diffusers' blocks: float32 inside, rounded where Diffusers rounds. Does not know:
layers. ``modulation`` is [batch, tokens or 1, rows, channels], to which ``table`` [1, rows, channels] is
added if there is one; ``gate`` and ``shift`` say which rows are taken, -1: none. The scale is the row after
the shift.
"""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

_KERNELS_KNOW = (torch.bfloat16, torch.float16, torch.float32)


def norm_now(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: Tensor | None,
    table: Tensor | None,
    shift: int,
    eps: float,
) -> Tensor:
    """Layer norm of x, with weight and bias [channels] or modulation; the shape and dtype of x."""
    if takes(x, weight, bias, modulation, table):
        out = x.new_empty(x.shape)
        launch(x, None, None, out, weight, bias, modulation, table, -1, shift, eps)
        return out
    return reference_norm(x, weight, bias, modulation, table, shift, eps)


norm = torch.library.custom_op("reelwright::fused_norm", norm_now, mutates_args=())


@torch.library.custom_op("reelwright::fused_add_norm", mutates_args=())
def add_norm(
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
    """hidden + gate * x, and its norm as above."""
    if takes(hidden, x, weight, bias, modulation, table):
        summed, normed = hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)
        launch(x, hidden, summed, normed, weight, bias, modulation, table, gate, shift, eps)
        return summed, normed
    summed = reference_add(hidden, x, modulation, table, gate).contiguous()
    return summed, reference_norm(summed, weight, bias, modulation, table, shift, eps)


@torch.library.custom_op("reelwright::fused_add_norm_", mutates_args=("hidden",))
def add_norm_(
    hidden: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: Tensor | None,
    table: Tensor | None,
    gate: int,
    shift: int,
    eps: float,
) -> Tensor:
    """The same; hidden becomes the sum, and the norm is given."""
    if takes(hidden, x, weight, bias, modulation, table):
        normed = hidden.new_empty(hidden.shape)
        launch(x, hidden, hidden, normed, weight, bias, modulation, table, gate, shift, eps)
        return normed
    hidden.copy_(reference_add(hidden, x, modulation, table, gate))
    return reference_norm(hidden, weight, bias, modulation, table, shift, eps)


@torch.library.custom_op("reelwright::fused_add_norm_over_", mutates_args=("x",))
def add_norm_over_(
    hidden: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: Tensor | None,
    table: Tensor | None,
    gate: int,
    shift: int,
    eps: float,
) -> Tensor:
    """The same; x becomes the norm, and the sum is given."""
    if takes(hidden, x, weight, bias, modulation, table):
        summed = hidden.new_empty(hidden.shape)
        launch(x, hidden, summed, x, weight, bias, modulation, table, gate, shift, eps)
        return summed
    summed = reference_add(hidden, x, modulation, table, gate).contiguous()
    x.copy_(reference_norm(summed, weight, bias, modulation, table, shift, eps))
    return summed


@torch.library.custom_op("reelwright::fused_add_norm_both_", mutates_args=("hidden", "x"))
def add_norm_both_(
    hidden: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: Tensor | None,
    table: Tensor | None,
    gate: int,
    shift: int,
    eps: float,
) -> None:
    """The same; hidden becomes the sum, and x the norm."""
    if takes(hidden, x, weight, bias, modulation, table):
        launch(x, hidden, hidden, x, weight, bias, modulation, table, gate, shift, eps)
    else:
        hidden.copy_(reference_add(hidden, x, modulation, table, gate))
        x.copy_(reference_norm(hidden, weight, bias, modulation, table, shift, eps))


@torch.library.custom_op("reelwright::fused_add_", mutates_args=("hidden",))
def add_(hidden: Tensor, x: Tensor, modulation: Tensor | None, table: Tensor | None, gate: int) -> None:
    """hidden becomes hidden + gate * x."""
    if takes(hidden, x, modulation, table):
        launch(x, hidden, hidden, None, None, None, modulation, table, gate, -1, 0.0)
    else:
        hidden.copy_(reference_add(hidden, x, modulation, table, gate))


@norm.register_fake
def _(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)


@add_norm.register_fake
def _(hidden: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), hidden.new_empty(hidden.shape)


@add_norm_.register_fake
def _(hidden: Tensor, *rest: object) -> Tensor:
    return hidden.new_empty(hidden.shape)


@add_norm_over_.register_fake
def _(hidden: Tensor, *rest: object) -> Tensor:
    return hidden.new_empty(hidden.shape)


def reference_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    modulation: Tensor | None,
    table: Tensor | None,
    shift: int,
    eps: float,
) -> Tensor:
    """``norm`` in plain PyTorch."""
    wide = _wide(x.dtype)
    weight, bias = (None if each is None else each.to(wide) for each in (weight, bias))
    out = layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps)
    if modulation is not None and shift >= 0:
        scale = modulation_row(modulation, table, shift + 1, wide)
        out = out * (1 + scale) + modulation_row(modulation, table, shift, wide)
    return out.to(x.dtype).contiguous()


def reference_add(
    hidden: Tensor, x: Tensor, modulation: Tensor | None, table: Tensor | None, gate: int
) -> Tensor:
    """``hidden + gate * x`` in plain PyTorch."""
    wide = _wide(hidden.dtype)
    product = x.to(wide)
    if modulation is not None and gate >= 0:
        product = product * modulation_row(modulation, table, gate, wide)
    return (hidden.to(wide) + product).to(hidden.dtype)


def modulation_row(modulation: Tensor, table: Tensor | None, index: int, dtype: torch.dtype) -> Tensor:
    """One row of each token's modulation, [batch, tokens or 1, channels]."""
    values = modulation[:, :, index].to(dtype)
    return values if table is None else values + table[:, index, None].to(dtype)


def kernels_take(*tensors: Tensor | None) -> bool:
    """Whether these are a GPU's, with dense rows of a dtype that the kernels know."""
    there = [x for x in tensors if x is not None]
    return all(x.is_cuda and x.dtype in _KERNELS_KNOW and x.stride(-1) == 1 for x in there)


def takes(x: Tensor, *rest: Tensor | None) -> bool:
    """Whether the kernel takes x and what goes with it, the last two of it modulation and table."""
    if not kernels_take(x, *rest):
        return False
    *same, modulation, table = rest
    dense = all(each.is_contiguous() for each in (x, *same, table) if each is not None)
    rows = modulation is None or modulation.stride(2) == modulation.shape[3]
    return dense and rows


def launch(*arguments: Tensor | float | None) -> None:
    """``add_norm_triton``, which is imported where it is used only: not every machine has Triton."""
    from pipelines.fused.kernels import add_norm_triton

    add_norm_triton(*arguments)  # type: ignore[arg-type]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
