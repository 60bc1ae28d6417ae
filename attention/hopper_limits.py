"""Which calls the kernels of ``hopper_tiles.py``'s kind take. Knows devices and dtypes; imports no kernel."""

import torch

from attention.choice import is_hopper

HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)


def hopper_takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the ``hopper.py`` of an operator runs this."""
    return is_hopper(device) and head_dim in HEAD_DIMS and dtype in DTYPES
