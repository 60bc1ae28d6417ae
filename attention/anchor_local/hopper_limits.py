"""Which calls Hopper's kernels take. Knows devices and dtypes; imports no kernel."""

import torch

from attention.choice import Precision, is_hopper

HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)


def hopper_takes(device: torch.device, dtype: torch.dtype, head_dim: int, precision: Precision) -> bool:
    """Whether ``hopper.py``, or for fp8 ``hopper_fp8.py``, runs this; 8 bits are made of any dtype."""
    return is_hopper(device) and head_dim in HEAD_DIMS and (precision == "fp8" or dtype in DTYPES)
