"""Self-attention of a forward pass whose clip tokens are shared by several ranks.

Knows: which rank has which tokens, and what attention needs of other ranks'. Does not know: transformers, or
what is dense. Tensors are [batch, tokens, heads, head_dim]: text, which all ranks have and compute alike, and
then the rank's own tokens of the clip.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention.anchor_local.api import anchor_local_ordered
from attention.backends import TokenGrid, TokenOrder
from attention.layout import clip_layout
from attention.parallel.partial import merged, partial_attention
from attention.parallel.ranks import RankGroup, Transfer
from attention.parallel.sharing import AnchorShare, Share, anchor_share, raster_share
from attention.parallel.support import Anchored

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Shards:
    """The tokens of one pass, shared out.

    Attributes:
        anchored: the pattern that tokens are shared out by; None: by the raster.
    """

    ranks: RankGroup
    grid: TokenGrid
    anchored: Anchored | None

    def order(self, device: torch.device) -> TokenOrder:
        """This rank's tokens, and how all ranks' make the clip again."""
        share = self._share(device, text=0)
        return TokenOrder(share.order, share.inverse, lambda rows: self._all_tokens(rows, max(share.tokens)))

    def by_heads(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, text: int) -> Tensor:
        """Attention that needs all tokens: each rank computes it for its part of the heads (Ulysses).

        Without anchors the clip's tokens are in raster order within ``attend``, and behind the text.
        """
        _require_equal_heads(q, k)
        share, ranks = self._share(q.device, text), self.ranks
        size, own = ranks.size, share.tokens[ranks.rank]
        by_rank = [x[:, text:].unflatten(2, (size, -1)).permute(2, 1, 0, 3, 4) for x in (q, k, v)]
        sent = torch.stack(by_rank, dim=2).flatten(0, 1)  # [ranks * own, 3, B, H / ranks, D]
        clip = ranks.exchange(sent, [own] * size, share.tokens).wait().permute(1, 2, 0, 3, 4)
        if text:
            of_text = [x[:, :text].unflatten(2, (size, -1))[:, :, ranks.rank] for x in (q, k, v)]
            clip = torch.cat([torch.stack(of_text), clip], dim=2)
        out = attend(*clip.unbind())  # of [B, text and clip, H / ranks, D]
        back = ranks.exchange(out[:, text:].transpose(0, 1), share.tokens, [own] * size)
        text_parts = ranks.gather(out[:, :text]) if text else None
        whole = _heads_together(back.wait().unflatten(0, (size, own)).transpose(1, 2))
        if text_parts is None:
            return whole
        return torch.cat([_heads_together(text_parts.wait()), whole], dim=1)

    def by_anchors(self, q: Tensor, k: Tensor, v: Tensor, scale: float, text: int) -> Tensor:
        """anchor_local of a pass whose tokens are shared out by anchors.

        A local query sees its segment, which is here (or received, if it was cut), and all anchors, which are
        gathered. An anchor query sees all: every rank computes it over its own keys, and the anchor's rank
        merges these parts while the local queries are computed.
        """
        _require_equal_heads(q, k)
        anchored, share = self.anchored, self._share(q.device, text).anchored
        if anchored is None or share is None:
            raise RuntimeError("the tokens of this pass are not shared out by anchors")
        first_local = text + share.anchors[self.ranks.rank]
        gathering = self._gather_anchors(share, q, k, v, text)
        exchanging = self._exchange_cut(share, k[:, first_local:], v[:, first_local:])
        q_anchors, k_anchors, v_anchors = self._anchors(share, gathering, q, k, v)
        # All ranks have the keys of text, which must count once.
        k_own, v_own = (k, v) if self.ranks.rank == 0 else (k[:, text:], v[:, text:])
        see_all = torch.cat([q[:, :text], q_anchors], dim=1)
        merging: list[Transfer] = []
        if see_all.shape[1]:  # without text there may be none
            merging = self._start_merge(share, partial_attention(see_all, k_own, v_own, scale), text)
        outs = []
        if share.layout.queries:
            k_cut, v_cut = _received(exchanging)
            keys = _keys(k[:, :text], k_anchors, k[:, first_local:], k_cut, share.before)
            values = _keys(v[:, :text], v_anchors, v[:, first_local:], v_cut, share.before)
            queries = q[:, first_local:]
            outs = [
                anchor_local_ordered(queries, keys, values, share.layout, scale=scale, impl=anchored.impl)
            ]
        return torch.cat([*(self._merged(transfer, q.shape[3]) for transfer in merging), *outs], dim=1)

    def _share(self, device: torch.device, text: int) -> Share:
        return _share(self.anchored, self.grid, self.ranks.size, self.ranks.rank, text, device)

    def _all_tokens(self, rows: Tensor, most: int) -> Tensor:
        """All ranks' [batch, own tokens, channels]: [batch, ranks * most, channels]."""
        padded = pad(rows, (0, 0, 0, most - rows.shape[1]))
        return self.ranks.gather(padded).wait().transpose(0, 1).flatten(1, 2)

    def _gather_anchors(
        self, share: AnchorShare, q: Tensor, k: Tensor, v: Tensor, text: int
    ) -> Transfer | None:
        most = max(share.anchors)
        if not most:
            return None
        own = share.anchors[self.ranks.rank]
        together = torch.stack([x[:, text : text + own] for x in (q, k, v)])
        return self.ranks.gather(pad(together, (0, 0, 0, 0, 0, most - own)))

    def _anchors(
        self, share: AnchorShare, gathering: Transfer | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of all anchors."""
        if gathering is None:
            return q[:, :0], k[:, :0], v[:, :0]
        rows = gathering.wait().permute(1, 2, 0, 3, 4, 5).flatten(2, 3)  # [3, B, ranks * most, H, D]
        if share.anchor_rows is not None:
            rows = rows.index_select(2, share.anchor_rows)
        q, k, v = rows.unbind()
        return q, k, v

    def _exchange_cut(self, share: AnchorShare, k: Tensor, v: Tensor) -> Transfer | None:
        """The keys of this rank's segments that other ranks have: [rows, B, 2 * H, D]."""
        if not share.is_cut:
            return None
        together = torch.cat([k, v], dim=2).transpose(0, 1)
        sent = torch.cat([together[begin:end] for begin, end in share.sent])
        return self.ranks.exchange(sent, [end - begin for begin, end in share.sent], share.received)

    def _start_merge(self, share: AnchorShare, parts: Tensor, text: int) -> list[Transfer]:
        """Send this rank's parts of text to all ranks, and those of anchors to the anchors' ranks."""
        rows = parts.transpose(0, 1)  # [text and anchors, B, H, D + e]
        own = share.anchors[self.ranks.rank]
        transfers = [self.ranks.gather(rows[:text])] if text else []
        if max(share.anchors):
            transfers.append(self.ranks.exchange(rows[text:], share.anchors, [own] * self.ranks.size))
        return transfers

    def _merged(self, transfer: Transfer, head_dim: int) -> Tensor:
        """[B, tokens, H, D] of [ranks, tokens, B, H, D + e], or of [ranks * tokens, ...]."""
        rows = transfer.wait()
        if rows.ndim == 4:
            rows = rows.unflatten(0, (self.ranks.size, rows.shape[0] // self.ranks.size))
        return merged(rows, head_dim).transpose(0, 1)


def _received(exchanging: Transfer | None) -> tuple[Tensor | None, Tensor | None]:
    """k and v [B, rows, H, D] of what other ranks sent."""
    if exchanging is None:
        return None, None
    k, v = exchanging.wait().transpose(0, 1).chunk(2, dim=2)
    return k, v


def _keys(text: Tensor, anchors: Tensor, own: Tensor, received: Tensor | None, before: int) -> Tensor:
    """All keys of the local queries, in the order of the rank's layout."""
    if received is None:
        return torch.cat([text, anchors, own], dim=1)
    return torch.cat([text, anchors, received[:, :before], own, received[:, before:]], dim=1)


def _require_equal_heads(q: Tensor, k: Tensor) -> None:
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"ranks need as many key heads as query heads, got {k.shape[2]} and {q.shape[2]}")


def _heads_together(parts: Tensor) -> Tensor:
    """Every rank's heads [ranks, B, tokens, H / ranks, D]: [B, tokens, H, D]."""
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)


@lru_cache(maxsize=64)  # a model asks at every layer and step
def _share(
    anchored: Anchored | None, grid: TokenGrid, ranks: int, rank: int, text: int, device: torch.device
) -> Share:
    if anchored is None:
        return raster_share(grid.tokens, ranks, rank, device)
    layout = clip_layout(anchored.pattern, grid.thw, torch.device("cpu"))
    return anchor_share(layout, ranks, rank, text, device)
