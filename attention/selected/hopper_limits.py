"""Which calls Hopper's kernel takes. Knows devices, dtypes and strides; imports no kernel."""

import torch
from torch import Tensor

from attention.choice import is_hopper

WIDTHS = (512, 576)
DTYPES = (torch.bfloat16, torch.float16)
_COPY_BYTES = 16


def hopper_takes(q: Tensor, kv: Tensor) -> bool:
    """Whether ``gluon_impl.py`` runs this: its copies are of 16 bytes, so rows must start at multiples."""
    fits_width = q.shape[-1] in WIDTHS and q.dtype in DTYPES
    return is_hopper(q.device) and fits_width and _rows_are_aligned(q) and _rows_are_aligned(kv)


def _rows_are_aligned(x: Tensor) -> bool:
    elements = _COPY_BYTES // x.element_size()
    is_whole = all(stride % elements == 0 for stride in x.stride()[:-1])
    return x.stride(-1) == 1 and is_whole and x.data_ptr() % _COPY_BYTES == 0
