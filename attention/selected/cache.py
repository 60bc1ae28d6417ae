"""The rows that later tokens attend to: a ring of the last raw ones, then entries that only grow."""

import torch
from torch import Tensor

from attention.selected.span import Span


class KVCache:
    """Rows of a batch of sequences in one tensor, as sparse_attn reads them.

    The raw row of position p is in slot ``p % window``; entry j is row ``window + j``. What no token has
    written is never read, so nothing has to be cleared between sequences.

    Args:
        batch: sequences.
        window: raw rows that are kept; may be 0.
        entries: most entries of a sequence; may be 0.
        width: channels of a row.
    """

    def __init__(
        self, batch: int, window: int, entries: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.window = window
        # The last row takes what padding would write.
        self._storage = torch.zeros(batch, window + entries + 1, width, dtype=dtype, device=device)

    @property
    def rows(self) -> Tensor:
        """[batch, window + entries, width]: the ring and the entries, not a copy."""
        return self._storage[:, :-1]

    @property
    def ring(self) -> Tensor:
        """[batch, window, width], not a copy."""
        return self._storage[:, : self.window]

    @property
    def entries(self) -> Tensor:
        """[batch, entries, width], not a copy."""
        return self._storage[:, self.window : -1]

    def fill_ring(self, raw: Tensor, span: Span) -> None:
        """Keep the last ``window`` of a span's rows [batch, length, width]."""
        ends = span.first_positions + torch.tensor(span.counts, device=raw.device)
        is_kept = (span.positions >= 0) & (span.positions >= (ends - self.window)[:, None])
        self._put(raw, span.positions % self.window, is_kept)

    def append(self, entries: Tensor, span: Span, ratio: int) -> None:
        """Add what a compressor returned for a span, [batch, most, width]."""
        if entries.shape[1] == 0:
            return
        index = torch.arange(entries.shape[1], device=entries.device)
        finished = torch.tensor(span.closed_windows(ratio), device=entries.device)
        first = self.window + span.first_positions // ratio
        self._put(entries, first[:, None] + index, index < finished[:, None])

    def _put(self, rows: Tensor, slots: Tensor, is_row: Tensor) -> None:
        batch = torch.arange(len(rows), device=rows.device)[:, None]
        self._storage[batch, slots.where(is_row, self._storage.shape[1] - 1)] = rows.to(self._storage.dtype)


def entries_of(tokens: int, ratio: int) -> int:
    """Entries that a cache for so many tokens has room for; a last window that is not full has one too."""
    return -(-tokens // ratio)
