"""Where the fp8 kernel finds the values of each segment: columns of the transposed v.

Bulk copies begin at multiples of 16 bytes, and a segment begins anywhere. So v is stored twice, side by side:
all tokens in order, read for anchor keys and anchor queries; and each segment from a multiple of 16 on.

Knows layouts. Does not know kernels.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attention.layout import AnchorLocalLayout

ALIGNMENT = 16


@dataclass(frozen=True, slots=True, eq=False)
class ValueColumns:
    """Columns of the transposed v, on the device of the kernel.

    Attributes:
        width: number of columns, a multiple of 16.
        second: int32 [tokens]; the token's column in the second copy, -1 for one that has none. Its column in
            the first copy is its position.
        unused: int64 columns of no token; they must be zero.
        begins: int32 [runs] on the CPU; where the keys of each run of the layout begin in the second copy.
    """

    width: int
    second: Tensor
    unused: Tensor
    begins: Tensor


@lru_cache(maxsize=64)
def value_columns(layout: AnchorLocalLayout, device: torch.device) -> ValueColumns:
    """Columns for the runs of this layout.

    Raises:
        ValueError: the keys of two runs overlap.
    """
    second = torch.full([layout.tokens], -1, dtype=torch.int32)
    end = _aligned(layout.tokens)
    begins, unused = [], [torch.arange(layout.tokens, end)]
    for key_begin, key_end in layout.runs[:, 2:].tolist():
        if (second[key_begin:key_end] >= 0).any():
            raise ValueError("precision='fp8' needs segments of keys that do not overlap")
        begins.append(end)
        stop = end + key_end - key_begin
        second[key_begin:key_end] = torch.arange(end, stop, dtype=torch.int32)
        end = _aligned(stop)
        unused.append(torch.arange(stop, end))
    return ValueColumns(
        end, second.to(device), torch.cat(unused).to(device), torch.tensor(begins, dtype=torch.int32)
    )


def _aligned(columns: int) -> int:
    return -(-columns // ALIGNMENT) * ALIGNMENT
