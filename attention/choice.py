"""What every operator's contract shares: which implementation runs, and the scale of the scores.

Knows devices and dtypes. Does not know any operator.
"""

import math
import os
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

Impl = Literal["auto", "reference", "torch", "triton"]
Chosen = Literal["reference", "torch", "triton"]
Precision = Literal["full", "fp8"]
MAX_HEAD_DIM = 256
FP8_CAPABILITY = (8, 9)  # Ada; Hopper is (9, 0)
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_impl(impl: str) -> None:
    """Raise ValueError unless it is the name of one, or auto."""
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {', '.join(get_args(Impl))}, got {impl!r}")


def resolve_impl(impl: str, q: Tensor) -> Chosen:
    """What will run for this tensor. Raises ValueError if the named implementation cannot."""
    check_impl(impl)
    if impl == "auto":
        return "triton" if q.is_cuda and q.dtype in _TRITON_DTYPES else "torch"
    if impl == "triton":
        if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                "impl='triton' needs CUDA tensors (or TRITON_INTERPRET=1 to interpret on the CPU)"
            )
        if q.dtype not in _TRITON_DTYPES:
            raise ValueError(f"impl='triton' takes float32, bfloat16 or float16, got {q.dtype}")
        return "triton"
    return "reference" if impl == "reference" else "torch"


def check_precision(precision: str, impl: str, device: torch.device | None) -> None:
    """Raise ValueError unless attention can run on the device (None: not known yet) with this precision.

    ``full`` computes in the format of the inputs. ``fp8`` exists as a Triton kernel only, for GPUs that have
    float8 matrix products; with ``impl="triton"`` the interpreter may play one.
    """
    if precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise ValueError(f"precision must be one of {known}, got {precision!r}")
    if precision == "full":
        return
    if impl not in ("auto", "triton"):
        raise ValueError(f"precision='fp8' is a Triton kernel: it cannot run with impl={impl!r}")
    if device is None:
        return
    if device.type == "cuda":
        if (found := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
            name, (major, minor) = torch.cuda.get_device_name(device), found
            raise ValueError(
                f"precision='fp8' needs a GPU of compute capability 8.9 or newer (Ada, Hopper); "
                f"{name} has {major}.{minor}; take precision='full'"
            )
    elif impl != "triton" or os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"precision='fp8' needs a GPU, got device {device.type}; take precision='full'")


def checked_scale(scale: float | None, head_dim: int) -> float:
    """The scale, by default ``head_dim ** -0.5``. Raises ValueError unless it is positive and finite."""
    if scale is None:
        return float(head_dim**-0.5)
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return scale


@lru_cache(maxsize=8)
def is_hopper(device: torch.device) -> bool:
    """Compute capability 9.0, whose matrix units take their operands as no other's do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=8)
def is_data_center_gpu(device: torch.device) -> bool:
    """Compute capability 9 or 10 (Hopper, Blackwell): bulk copies and 227 KiB of shared memory a program.

    Consumer Blackwell, capability 12, has the copies but only 99 KiB.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
