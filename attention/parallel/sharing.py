"""Which tokens of a clip each rank has, and which rows it must send to others.

Knows: token orders and key ranges. Does not know: processes, or how anything is computed.

In the anchors-first order of a layout::

    [ anchors | block 0 without anchors | block 1 without anchors | ... ]

every rank has an equal run of the anchors and an equal run of the others. Anchors are gathered on all ranks,
so it does not matter who has which. A border between ranks is moved to the next border between segments if
the ranks' numbers of tokens stay within 1/64 of each other; if not, the segment is cut, at a multiple of the
kernel's query rows where that is near enough, and ranks that have parts of it exchange these parts' keys.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from attention.layout import AnchorLocalLayout

# Most of a transformer's work is in proportion to tokens, whatever they see (at Wan 14B's width the layers
# beside self-attention cost as much as 29,000 keys a token), so tokens are what is balanced.
TOLERANCE = 64
TILE_ROWS = 128  # of the kernel: a cut at a multiple of it makes no partial tile more


@dataclass(frozen=True, eq=False)
class AnchorShare:
    """What a rank needs for attention over the anchors and its segments.

    Attributes:
        anchors: own anchors of each rank; a rank's own tokens are its anchors and then its others.
        anchor_rows: int64, on the device: the anchors in gathered [ranks * max(anchors)] rows; None: all are.
        sent: rows of this rank's others to each rank, (begin, end).
        received: how many rows come from each rank.
        before: how many of these lie before this rank's own others; the rest lies behind.
        layout: this rank's others as queries; the keys are all anchors, then the rows received before, its
            own and those behind.
        is_cut: whether any rank sends any rows.
    """

    anchors: tuple[int, ...]
    anchor_rows: Tensor | None
    sent: tuple[tuple[int, int], ...]
    received: tuple[int, ...]
    before: int
    layout: AnchorLocalLayout
    is_cut: bool


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of a clip.

    Attributes:
        tokens: of each rank.
        order: int64 [tokens[rank]], on the device: positions in the clip of this rank's tokens.
        inverse: int64 [tokens of the clip]: where each is in gathered [ranks * max(tokens)] rows.
        anchored: None: tokens are shared out in raster order, and attention needs all of them.
    """

    tokens: tuple[int, ...]
    order: Tensor
    inverse: Tensor
    anchored: AnchorShare | None


def raster_share(tokens: int, ranks: int, rank: int, device: torch.device) -> Share:
    """Equal runs of the raster.

    Raises:
        ValueError: fewer tokens than ranks.
    """
    bounds = [tokens * r // ranks for r in range(ranks + 1)]
    return _share([torch.arange(*bound) for bound in pairwise(bounds)], rank, device, None)


def anchor_share(layout: AnchorLocalLayout, ranks: int, rank: int, text: int, device: torch.device) -> Share:
    """Equal runs of the anchors and of the others of a clip's layout, which is on the CPU.

    ``text`` tokens lie before the anchors in the keys of the rank's layout.

    Raises:
        ValueError: fewer tokens than ranks.
    """
    borders = [0, *(layout.runs[:, 1] - layout.anchors).tolist()]
    others = layout.tokens - layout.anchors
    # Rounded in opposite directions, so that few tokens still give every rank one.
    anchors = list(pairwise(-(-layout.anchors * r // ranks) for r in range(ranks + 1)))
    runs = list(pairwise(_border(others * r // ranks, borders, others // ranks) for r in range(ranks + 1)))
    order = layout.key_order
    parts = [
        torch.cat([order[slice(*own)], order[layout.anchors :][slice(*run)]])
        for own, run in zip(anchors, runs, strict=True)
    ]
    keys = [_key_range(run, borders) for run in runs]
    counts = tuple(end - begin for begin, end in anchors)
    anchored = AnchorShare(
        anchors=counts,
        anchor_rows=None if len(set(counts)) == 1 else _unpadded(counts).to(device),
        sent=tuple(_overlap(runs[rank], keys[other], rank == other) for other in range(ranks)),
        received=tuple(_length(_overlap(runs[other], keys[rank], rank == other)) for other in range(ranks)),
        before=runs[rank][0] - keys[rank][0],
        layout=_own_layout(runs[rank], keys[rank], borders, layout.anchors + text, device),
        is_cut=keys != runs,
    )
    return _share(parts, rank, device, anchored)


def _share(parts: list[Tensor], rank: int, device: torch.device, anchored: AnchorShare | None) -> Share:
    tokens = tuple(part.numel() for part in parts)
    if not min(tokens):
        raise ValueError(f"{sum(tokens)} tokens of a clip cannot be shared by {len(tokens)} ranks")
    order = torch.cat(parts)
    inverse = torch.empty_like(order)
    inverse[order] = _unpadded(tokens)
    return Share(tokens, parts[rank].to(device), inverse.to(device), anchored)


def _unpadded(counts: tuple[int, ...]) -> Tensor:
    """Rows in use of [ranks * max(counts)], where each rank's are the first of its own."""
    return torch.cat([torch.arange(count) + rank * max(counts) for rank, count in enumerate(counts)])


def _border(position: int, borders: list[int], share: int) -> int:
    """Where ranks are divided instead of at this position."""
    nearest = min(borders, key=lambda border: abs(border - position))
    begin = max(border for border in borders if border <= position)
    at_tile = begin + (position - begin + TILE_ROWS // 2) // TILE_ROWS * TILE_ROWS
    for choice in (nearest, at_tile):
        if abs(choice - position) <= share // TOLERANCE // 2:
            return choice
    return position


def _key_range(run: tuple[int, int], borders: list[int]) -> tuple[int, int]:
    """The others of all segments that a run of others has a part of."""
    begin, end = run
    if begin == end:
        return run
    return max(b for b in borders if b <= begin), min(b for b in borders if b >= end)


def _overlap(run: tuple[int, int], keys: tuple[int, int], is_own: bool) -> tuple[int, int]:
    """Rows of a rank, counted from its first, that lie in the keys of another one."""
    begin, end = max(run[0], keys[0]), min(run[1], keys[1])
    return (0, 0) if is_own or end <= begin else (begin - run[0], end - run[0])


def _length(rows: tuple[int, int]) -> int:
    return rows[1] - rows[0]


def _own_layout(
    run: tuple[int, int], keys: tuple[int, int], borders: list[int], anchors: int, device: torch.device
) -> AnchorLocalLayout:
    begin, end = run
    runs = [
        [max(lo, begin) - begin, min(hi, end) - begin, anchors + lo - keys[0], anchors + hi - keys[0]]
        for lo, hi in pairwise(borders)
        if max(lo, begin) < min(hi, end)
    ]
    queries = torch.arange(end - begin, device=device)
    tokens = anchors + keys[1] - keys[0]
    return AnchorLocalLayout(
        tokens=tokens,
        anchors=anchors,
        key_order=torch.arange(tokens, device=device),
        query_order=queries,
        query_inverse=queries,
        anchor_queries=0,
        runs=torch.tensor(runs, dtype=torch.int64).reshape(-1, 4),
    )
