"""3D convolutions on a CPU by oneDNN, also the small ones.

Knows: that PyTorch leaves a float32 convolution of one clip to oneDNN only if channels x frames x height are
above 20,480, which is a rule for pictures; its own code, for the others, is several times slower. Does not
know: models or jobs.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# oneDNN had no memory for the code that it makes for a shape. It keeps that answer: it would say so for ever.
NO_CODE = "could not create a primitive"


def convolved_by_onednn(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Within the block, float32 convolutions of this thread on that device run so, if it is a CPU."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return contextlib.nullcontext()
    return _ByOneDnn()


class _ByOneDnn(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return (_conv3d if func is torch.conv3d else func)(*args, **(kwargs or {}))


def _conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    known = input.dtype == torch.float32 and input.device.type == "cpu" and input.ndim == 5
    if isinstance(padding, str) or not known:
        return torch.conv3d(input, weight, bias, stride, padding, dilation, groups)
    padding, stride, dilation = [_of_each_side(value) for value in (padding, stride, dilation)]
    try:
        return torch.mkldnn_convolution(input, weight, bias, padding, stride, dilation, groups)
    except RuntimeError as error:
        if NO_CODE not in str(error):
            raise
    return torch.conv3d(input, weight, bias, stride, padding, dilation, groups)


def _of_each_side(value: int | Sequence[int]) -> Sequence[int]:
    return (value,) * 3 if isinstance(value, int) else value
