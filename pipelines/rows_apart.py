"""Has the blocks of a network compute each row of a batch by itself, one after the other.

Knows: calls of blocks, and which of their tensors have a row for each of the batch. Does not know: the
network. What a row becomes then does not depend on the rows beside it, to the bit, and weights that come and
go block by block come once for all rows.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from pipelines.instance_forward import replaced_forward


@contextlib.contextmanager
def rows_apart(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Within the block, these modules compute so. Between them the network must keep rows apart by itself.

    The first argument of a call decides how many rows there are. Tensors of as many rows, also in tuples, are
    taken apart; every other argument goes along to each row.

    Raises:
        TypeError: from a call whose result is no tensor, and no tuple of tensors.
    """
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(replaced_forward(block, lambda forward: partial(_each_row, forward)))
        yield


def _each_row(forward: Callable[..., Any], hidden_states: torch.Tensor, *args: Any, **named: Any) -> Any:
    rows = len(hidden_states)
    if rows == 1:
        return forward(hidden_states, *args, **named)
    return _joined(
        [
            forward(
                hidden_states[row : row + 1],
                *(_row(value, row, rows) for value in args),
                **{name: _row(value, row, rows) for name, value in named.items()},
            )
            for row in range(rows)
        ]
    )


def _row(value: Any, row: int, rows: int) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows:
        return value[row : row + 1]
    if isinstance(value, tuple):
        return tuple(_row(each, row, rows) for each in value)
    return value


def _joined(results: list[Any]) -> Any:
    first = results[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(results)
    if isinstance(first, tuple):
        return tuple(_joined(list(each)) for each in zip(*results, strict=True))
    if first is None:
        return None
    raise TypeError(f"a block made a {type(first).__name__}, of which it is not known how its rows lie")
