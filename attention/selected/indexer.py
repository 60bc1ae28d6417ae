"""The indexer: which compressed entries a token attends to, by small heads that share one key for all."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attention.selected.cache import KVCache, entries_of
from attention.selected.compressor import Compressor, CompressorState
from attention.selected.indices import visible_entries
from attention.selected.quantization import hadamard, through_fp4
from attention.selected.rotary import Rotary, Turns
from attention.selected.span import Span

_SCORE_BYTES = 64 * 2**20  # of one chunk of tokens, heads x entries each


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Heads of the indexer, their channels, and the most entries that a token selects.

    Raises:
        ValueError: a value is below 1.
    """

    heads: int = 64
    head_dim: int = 128
    topk: int = 512

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"index {name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, eq=False)
class IndexerState:
    """The indexer's own entries, and the windows that are not finished."""

    cache: KVCache
    compressor: CompressorState


class Indexer(nn.Module):
    """Scores of token t and entry j: ``sum_h relu(q_h . k_j) * w_h``, for entries visible to t.

    Args:
        config: sizes.
        dim: channels of a token.
        q_rank: channels of the low-rank query that attention shares with the indexer.
        ratio, rotary, overlap, eps: those of attention's compressor.
        simulate_quantization: queries and entries go through a Hadamard transform and FP4.
    """

    def __init__(
        self,
        config: IndexConfig,
        dim: int,
        q_rank: int,
        ratio: int,
        rotary: Rotary,
        *,
        overlap: bool,
        eps: float,
        simulate_quantization: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.ratio, self.simulate_quantization = config, ratio, simulate_quantization
        self.wq_b = nn.Linear(q_rank, config.heads * config.head_dim, bias=False, dtype=dtype)
        self.weights_proj = nn.Linear(dim, config.heads, bias=False, dtype=dtype)
        self.compressor = Compressor(
            dim,
            config.head_dim,
            ratio,
            rotary,
            overlap=overlap,
            eps=eps,
            quantization="fp4" if simulate_quantization else None,
        )
        self.requires_grad_(False)

    def new_state(self, batch: int, max_tokens: int) -> IndexerState:
        """State of so many sequences that have no token yet."""
        weight = self.wq_b.weight
        entries = entries_of(max_tokens, self.ratio)
        cache = KVCache(batch, 0, entries, self.config.head_dim, weight.dtype, weight.device)
        return IndexerState(cache, self.compressor.new_state(batch))

    def forward(self, x: Tensor, low_rank: Tensor, turns: Turns, span: Span, state: IndexerState) -> Tensor:
        """Take new tokens; give what each selects, those with the highest scores in front.

        Args:
            x: [batch, length, dim].
            low_rank: [batch, length, q_rank], normalised.
            turns: rotations of these tokens.
            span: their places; those before are in ``state``, which is brought up to date.

        Returns:
            int32 [batch, length, min(topk, entries)]: numbers of entries, -1 behind the last.
        """
        state.cache.append(self.compressor(x, span, state.compressor), span, self.ratio)
        q = self.wq_b(low_rank).unflatten(-1, (self.config.heads, self.config.head_dim))
        q = turns.of_heads().rotate(q)
        if self.simulate_quantization:
            q = through_fp4(hadamard(q))
        weights = self.weights_proj(x) * (self.config.head_dim * self.config.heads) ** -0.5
        entries = max((end // self.ratio for end in span.ends), default=0)
        keys = state.cache.entries[:, :entries]
        visible = visible_entries(span.positions, self.ratio)
        row_bytes = max(1, len(x) * self.config.heads * entries * torch.float32.itemsize)
        chunk = max(1, _SCORE_BYTES // row_bytes)
        selected = [
            select(index_scores(q[:, part], keys, weights[:, part]), visible[:, part], self.config.topk)
            for part in (slice(first, first + chunk) for first in range(0, span.length, chunk))
        ]
        return torch.cat(selected, dim=1)


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Scores [batch, tokens, entries] in float32 or wider.

    Args:
        q: [batch, tokens, heads, head_dim].
        keys: [batch, entries, head_dim].
        weights: [batch, tokens, heads].
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    products = (q.flatten(1, 2).to(wide) @ keys.to(wide).mT).unflatten(1, q.shape[1:3])
    scores: Tensor = weights.to(wide)[:, :, None] @ products.relu_()
    return scores[:, :, 0]


def select(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Numbers of the entries with the highest scores of the first ``visible`` ones; of equal ones the first.

    Args:
        scores: [batch, tokens, entries]; those of entries that are not visible may be anything.
        visible: int64 [batch, tokens].

    Returns:
        int32 [batch, tokens, min(topk, entries)], -1 behind the last that is visible.
    """
    entries = scores.shape[2]
    hidden = torch.arange(entries, device=scores.device) >= visible[:, :, None]
    index = _highest(scores.masked_fill(hidden, float("-inf")), min(topk, entries))
    return index.where(index < visible[:, :, None], -1).int()


def _highest(scores: Tensor, count: int) -> Tensor:
    """int64 [..., count]: places of the highest scores, highest first, of equal ones the first place first.

    Which of them ``topk`` gives depends on how many others it sees: ReLU makes many scores exactly 0, and a
    sequence has to select the same in one call as in many.
    """
    if scores.dtype != torch.float32:
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    # Integers in the order of the floats, 0 and -0 alike; behind each, the lower the place the higher.
    bits = (scores + 0.0).view(torch.int32).long()
    ordered = bits.where(bits >= 0, bits ^ 0x7FFFFFFF)
    place = torch.arange(scores.shape[-1], device=scores.device)
    highest = ((ordered << 32) | (0xFFFFFFFF - place)).topk(count, dim=-1).values
    return 0xFFFFFFFF - (highest & 0xFFFFFFFF)
