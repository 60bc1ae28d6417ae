"""Compression of a sequence: one entry for every window of tokens, pooled by gates of each channel.

Tokens come in any portions, one call behind the other, each sequence of a batch at its own place; what an
unfinished window needs later is in an explicit state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attention.selected.norm import RMSNorm
from attention.selected.quantization import Quantization, hadamard, through_fp4, through_fp8
from attention.selected.rotary import Rotary
from attention.selected.span import Span

EMPTY = float("-inf")  # gate of a slot that holds no token: weight 0


@dataclass(frozen=True, eq=False)
class CompressorState:
    """Rows of the window that is not finished, behind those of the window before it if windows overlap.

    Attributes:
        kv, gate: [batch, slots + 1, channels]; the last row takes what padding would write and is not read.
    """

    kv: Tensor
    gate: Tensor

    @classmethod
    def empty(
        cls, batch: int, slots: int, channels: int, dtype: torch.dtype, device: torch.device
    ) -> "CompressorState":
        """The state in front of a first token."""
        kv = torch.zeros(batch, slots + 1, channels, dtype=dtype, device=device)
        return cls(kv, torch.full_like(kv, EMPTY))

    def reset(self, sequences: Sequence[int] | slice = slice(None)) -> None:
        """Forget everything of these sequences of the batch."""
        self.kv[sequences] = 0
        self.gate[sequences] = EMPTY


class Compressor(nn.Module):
    """Entries of windows of ``ratio`` tokens. Projections, gates and pooling are in float32 or wider.

    Window i is pooled over its own tokens; with ``overlap`` also over those of window i - 1, for which a
    token has a second set of channels (the first half of the projections' rows). Entries are normalised and
    turned to the position of their window's first token.

    Args:
        dim: channels of a token.
        width: channels of an entry.
        ratio: tokens of a window.
        rotary: of the last channels of an entry.
        overlap: whether windows also take part in the next one's entry.
        quantization: of entries, simulated: ``fp8`` of the channels that rotary leaves alone; ``fp4`` of all
            after a Hadamard transform.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        ratio: int,
        rotary: Rotary,
        *,
        overlap: bool,
        eps: float = 1e-6,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__()
        self.ratio, self.width, self.rotary = ratio, width, rotary
        self.overlap, self.quantization = overlap, quantization
        self.windows = 2 if overlap else 1  # that an entry is pooled over
        channels = self.windows * width
        self.ape = nn.Parameter(torch.zeros(ratio, channels, dtype=torch.float32))
        self.wkv = nn.Linear(dim, channels, bias=False, dtype=torch.float32)
        self.wgate = nn.Linear(dim, channels, bias=False, dtype=torch.float32)
        self.norm = RMSNorm(width, eps)
        self.requires_grad_(False)

    def new_state(self, batch: int) -> CompressorState:
        """State of so many sequences that have no token yet."""
        dtype = torch.promote_types(self.ape.dtype, torch.float32)
        slots = self.windows * self.ratio
        return CompressorState.empty(batch, slots, self.windows * self.width, dtype, self.ape.device)

    def forward(self, x: Tensor, span: Span, state: CompressorState) -> Tensor:
        """Take new tokens; give the entries of the windows that they finish.

        Args:
            x: [batch, length, dim].
            span: their places; those before are in ``state``, which is brought up to date.

        Returns:
            [batch, most, width] of dtype x: entries ``start // ratio ..`` of each sequence in front, then
            zeros up to the most entries that one of them has.
        """
        rows = x.to(state.kv.dtype)
        kv = linear(rows, self.wkv.weight.to(rows.dtype))
        gate = linear(rows, self.wgate.weight.to(rows.dtype))
        gate += self.ape.to(rows.dtype)[span.positions % self.ratio]
        closed = span.closed_windows(self.ratio)
        most = max(closed, default=0)
        lead = (self.windows - 1) * self.ratio
        slots = span.positions - (span.first_positions // self.ratio * self.ratio - lead)[:, None]
        if most == 0:
            _put(state.kv, slots, span, kv)
            _put(state.gate, slots, span, gate)
            return x.new_zeros(x.shape[0], 0, self.width)
        all_kv = _extended(state.kv, most * self.ratio, 0)
        all_gate = _extended(state.gate, most * self.ratio, EMPTY)
        _put(all_kv, slots, span, kv)
        _put(all_gate, slots, span, gate)
        finished = torch.tensor(closed, device=x.device)
        is_entry = torch.arange(most, device=x.device) < finished[:, None]
        pooled = self._pool(all_kv, all_gate, most).where(is_entry[:, :, None], 0)
        kept = finished[:, None] * self.ratio + torch.arange(lead + self.ratio, device=x.device)
        batch = torch.arange(x.shape[0], device=x.device)[:, None]
        state.kv[:, :-1] = all_kv[batch, kept]
        state.gate[:, :-1] = all_gate[batch, kept]
        first = span.first_positions // self.ratio * self.ratio
        positions = first[:, None] + self.ratio * torch.arange(most, device=x.device)
        return self._finish(pooled, positions, x.dtype)

    def _pool(self, kv: Tensor, gate: Tensor, entries: int) -> Tensor:
        """[batch, entries, width] from rows [batch, windows * ratio + 1, channels]."""
        kv, gate = (part[:, :-1].unflatten(1, (-1, self.ratio)) for part in (kv, gate))
        if self.overlap:
            before, own = slice(0, entries), slice(1, entries + 1)
            kv, gate = (
                torch.cat([part[:, before, :, : self.width], part[:, own, :, self.width :]], dim=2)
                for part in (kv, gate)
            )
        return (gate[:, :entries].softmax(2) * kv[:, :entries]).sum(2)

    def _finish(self, pooled: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        entries = self.rotary.turns(positions).rotate(self.norm(pooled)).to(dtype)
        if self.quantization == "fp4":
            return through_fp4(hadamard(entries))
        return fp8_but_rotary(entries, self.rotary) if self.quantization == "fp8" else entries


def fp8_but_rotary(rows: Tensor, rotary: Rotary) -> Tensor:
    """Rows as FP8 holds them, but for the channels that turn, which stay exact."""
    kept = rows.shape[-1] - rotary.dims
    return torch.cat([through_fp8(rows[..., :kept]), rows[..., kept:]], dim=-1)


def _extended(rows: Tensor, more: int, value: float) -> Tensor:
    """A copy with so many more rows of this value, which then has a last row for padding too."""
    new = rows.new_full((rows.shape[0], more + 1, rows.shape[2]), value)
    return torch.cat([rows[:, :-1], new], dim=1)


def _put(target: Tensor, slots: Tensor, span: Span, rows: Tensor) -> None:
    """target[i, slots[i]] = rows[i] for each sequence i, in place; padding goes to the last row."""
    batch = torch.arange(len(target), device=target.device)[:, None]
    target[batch, slots.where(span.positions >= 0, target.shape[1] - 1)] = rows
