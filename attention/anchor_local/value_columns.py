"""Where the fp8 kernel finds the values of each segment: columns of the transposed v.

Bulk copies begin at multiples of 16 bytes, and a segment begins anywhere. All tokens in order come first, for
anchor keys, anchor queries and segments that begin at a multiple of 16. Other segments are stored once more,
from a multiple of 16 on.

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
        begins: int32 [runs], on the CPU; the column where the keys of each run of the layout begin.
    """

    sources: Tensor
    begins: Tensor

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.sources.numel()


@lru_cache(maxsize=64)
def value_columns(layout: AnchorLocalLayout, device: torch.device) -> ValueColumns:
    """Columns for the runs of this layout."""
    tokens = torch.arange(layout.tokens, dtype=torch.int32)
    begins, stored = _begins(layout.runs[:, 2:].tolist(), _aligned(layout.tokens))
    parts = [_filled(tokens)] + [_filled(tokens[begin:end]) for begin, end in stored]
    return ValueColumns(torch.cat(parts).to(device), torch.tensor(begins, dtype=torch.int32))


def _begins(keys: list[list[int]], first_column: int) -> tuple[list[int], list[list[int]]]:
    """Where the keys of each run begin; and the ranges of tokens stored from ``first_column`` on, in order.

    Runs whose keys overlap share a range if they begin at the same distance from a multiple of 16.
    """
    begins = [begin for begin, _ in keys]
    stored: list[list[int]] = []
    column = first_column  # where the last range begins
    for run in sorted(range(len(keys)), key=lambda run: (begins[run] % ALIGNMENT, begins[run])):
        begin, end = keys[run]
        if begin % ALIGNMENT == 0:
            continue
        if stored and (begin - stored[-1][0]) % ALIGNMENT == 0 and begin <= stored[-1][1]:
            stored[-1][1] = max(stored[-1][1], end)
        else:
            column += _aligned(stored[-1][1] - stored[-1][0]) if stored else 0
            stored.append([begin, end])
        begins[run] = column + begin - stored[-1][0]
    return begins, stored


def _filled(tokens: Tensor) -> Tensor:
    """Filled up with -1 to a multiple of 16."""
    return torch.nn.functional.pad(tokens, (0, _aligned(tokens.numel()) - tokens.numel()), value=-1)


def _aligned(columns: int) -> int:
    return -(-columns // ALIGNMENT) * ALIGNMENT
