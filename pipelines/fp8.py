"""Linear layers in fp8: weights e4m3 with a scale for each output, inputs with one for each row.

Knows: the number format and which layers take it. Does not know: models or devices beyond what fp8 needs.
``y = (x8 @ w8.T) * scale_x * scale_w + bias`` with ``x8 = round(x / scale_x)``, ``scale_x = max|row| / 448``.
Sums are kept in the matrix units over a whole product, which have fewer bits than float32 ("fast accum").
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

FORMAT = torch.float8_e4m3fn
LARGEST = 448.0
# Of the matrix units: both sides of a weight.
MULTIPLE = 16
SMALLEST_SCALE = 1e-12
NEEDED_CAPABILITY = (8, 9)


class Fp8Error(ValueError):
    """This machine or model has no use for fp8; the message says why."""


def require_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raise Fp8Error unless the device multiplies fp8 matrices."""
    if device.type != "cuda":
        raise Fp8Error(
            f"precision=fp8 needs a GPU that has it (compute capability 8.9 or newer), not {device}"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < NEEDED_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        found = ".".join(map(str, capability))
        raise Fp8Error(f"precision=fp8 needs compute capability 8.9 or newer; {name} has {found}")
    if dtype != torch.bfloat16:
        raise Fp8Error(f"precision=fp8 needs dtype=bfloat16, not {str(dtype).removeprefix('torch.')}")


class Fp8Linear(nn.Module):
    """A linear layer for inference; takes and gives bfloat16 [..., features]."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        quantised, scale = quantise_rows(linear.weight.detach())
        self.register_buffer("weight", quantised)
        self.register_buffer("weight_scale", scale.t().contiguous())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows, scale = quantise_rows(x.reshape(-1, self.in_features))
        return self.multiply_rows(rows.view(x.shape), scale)

    def multiply_rows(self, rows: Tensor, scale: Tensor) -> Tensor:
        """The same of rows e4m3 [..., features] that are quantised, with scales [n, 1]."""
        flat = rows.view(-1, self.in_features)
        out = multiply(flat, scale, self.weight, self.weight_scale, self.bias)
        return out.view(*rows.shape[:-1], self.out_features)


def multiply(
    rows: Tensor,
    scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """Quantised rows [n, in] with scales [n, 1], times the weight [out, in] of a layer: bfloat16 [n, out].

    ``out`` is written if it is given.
    """
    given = {} if out is None else {"out": out}
    return torch._scaled_mm(
        rows,
        weight.t(),
        scale_a=scale,
        scale_b=weight_scale,
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
        **given,
    )


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] -> the same in e4m3, and float32 [rows, 1] that it is to be multiplied by."""
    if x.is_cuda and not torch.compiler.is_compiling():
        from pipelines.row_kernels import quantise_rows_triton

        return quantise_rows_triton(x)
    # A graph has these operators, not the kernel, so that they are fused with what made x.
    wide = x.float()
    scale = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (wide * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(FORMAT), scale


def quantise_gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """``quantise_rows`` of GELU by tanh, which a GPU computes on the way."""
    if x.is_cuda:
        from pipelines.row_kernels import quantise_rows_triton

        return quantise_rows_triton(x, gelu=True)
    return quantise_rows(nn.functional.gelu(x, approximate="tanh"))


@torch.no_grad()
def to_fp8(blocks: Sequence[nn.Module]) -> int:
    """Replace the linear layers in these blocks whose sides allow it; returns how many.

    Raises:
        Fp8Error: there is none.
    """
    replaced = 0
    for block in blocks:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and not (
                    child.in_features % MULTIPLE or child.out_features % MULTIPLE
                ):
                    setattr(parent, name, Fp8Linear(child))
                    replaced += 1
    if not replaced:
        raise Fp8Error("precision=fp8: the model has no linear layer whose sides are multiples of 16")
    return replaced
