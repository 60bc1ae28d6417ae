"""Index lists for sparse_attn: the rows that the rules of windows and compression let a token see.

Everywhere -1 is no key, and a position of -1 (padding) sees nothing.
"""

import torch
from torch import Tensor


def window_indices(positions: Tensor, window: int, width: int, first_raw: Tensor | None = None) -> Tensor:
    """The last ``window`` tokens up to each one's own, oldest first.

    Token p of a sequence is row ``p % window`` of its ring, or, from ``first_raw`` on, row
    ``p - first_raw`` behind the ring.

    Args:
        positions: int64 [batch, tokens].
        window: tokens that are seen, and rows of the ring.
        width: entries of each list, at most ``window``; enough for the longest of these sequences.
        first_raw: int64 [batch]; None if all rows are in the ring.

    Returns:
        int32 [batch, tokens, width].
    """
    keys = positions[:, :, None] - torch.arange(width - 1, -1, -1, device=positions.device)
    rows = keys % window
    if first_raw is not None:
        behind = keys - first_raw[:, None, None]
        rows = rows.where(behind < 0, window + behind)
    return rows.where(keys >= 0, -1).int()


def visible_entries(positions: Tensor, ratio: int) -> Tensor:
    """How many compressed entries each token sees: all windows that end at or before it."""
    return (positions + 1) // ratio


def compressed_indices(positions: Tensor, ratio: int, entries: int) -> Tensor:
    """All visible ones of so many entries: int32 [batch, tokens, entries]."""
    index = torch.arange(entries, device=positions.device)
    return index.where(index < visible_entries(positions, ratio)[:, :, None], -1).int()


def shifted(indices: Tensor, offset: int) -> Tensor:
    """The same rows where ``offset`` others stand in front of them."""
    return (indices + offset).where(indices >= 0, -1)
