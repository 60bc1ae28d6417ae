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
    """Columns of the transposed v.

    Attributes:
        sources: int32 [columns], on the device of the kernel; the token whose values a column holds, -1 for
            one that holds zeros. The columns are a multiple of 16, and the first ones are all tokens.
        begins: int32 [runs], on the CPU; where the keys of each run of the layout begin in the second copy.
    """

    sources: Tensor
    begins: Tensor

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.sources.numel()


@lru_cache(maxsize=64)
def value_columns(layout: AnchorLocalLayout, device: torch.device) -> ValueColumns:
    """Columns for the runs of this layout; where keys of runs overlap, they are stored more than twice."""
    tokens = torch.arange(layout.tokens, dtype=torch.int32)
    end = _aligned(layout.tokens)
    begins, parts = [], [_filled(tokens)]
    for key_begin, key_end in layout.runs[:, 2:].tolist():
        begins.append(end)
        parts.append(_filled(tokens[key_begin:key_end]))
        end += parts[-1].numel()
    return ValueColumns(torch.cat(parts).to(device), torch.tensor(begins, dtype=torch.int32))


def _filled(tokens: Tensor) -> Tensor:
    """Filled up with -1 to a multiple of 16."""
    return torch.nn.functional.pad(tokens, (0, _aligned(tokens.numel()) - tokens.numel()), value=-1)


def _aligned(columns: int) -> int:
    return -(-columns // ALIGNMENT) * ALIGNMENT
