"""One layer of compressed attention in the shape of DeepSeek-V4: projections, cache, selection, attention.

Names and shapes of the parameters are those of the published inference code:

    wq_a.weight, q_norm.weight, wq_b.weight    low-rank query
    wkv.weight, kv_norm.weight                 the one key/value head
    wo_a.weight, wo_b.weight                   grouped low-rank output projection
    attn_sink                                  [heads]
    compressor.{ape, wkv.weight, wgate.weight, norm.weight}              with a ratio
    indexer.{wq_b.weight, weights_proj.weight, compressor.*}             with an indexer

Published checkpoints hold some of them as FP8 or FP4 with scales; those must be widened before they load.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attention.choice import Impl
from attention.selected.api import sparse_attn
from attention.selected.cache import KVCache, entries_of
from attention.selected.compressor import Compressor, CompressorState, fp8_but_rotary
from attention.selected.config import CompressedAttentionConfig
from attention.selected.indexer import Indexer, IndexerState
from attention.selected.indices import compressed_indices, shifted, window_indices
from attention.selected.norm import RMSNorm, normalized
from attention.selected.span import Span


@dataclass(eq=False)
class AttentionState:
    """What one layer remembers of a batch of sequences.

    Attributes:
        lengths: tokens of each sequence so far.
        max_tokens: most that one of them may have.
    """

    lengths: list[int]
    max_tokens: int
    cache: KVCache
    compressor: CompressorState | None
    indexer: IndexerState | None

    def reset(self, sequences: Sequence[int] | None = None) -> None:
        """Begin these sequences anew, by default all.

        Raises:
            ValueError: there is no such sequence; nothing has changed then.
        """
        chosen = list(range(len(self.lengths)) if sequences is None else sequences)
        if wrong := [sequence for sequence in chosen if not 0 <= sequence < len(self.lengths)]:
            raise ValueError(f"sequences must be 0 .. {len(self.lengths) - 1}, got {wrong}")
        for sequence in chosen:
            self.lengths[sequence] = 0
        if self.compressor is not None:
            self.compressor.reset(chosen)
        if self.indexer is not None:
            self.indexer.compressor.reset(chosen)

    def next_span(self, length: int, counts: Sequence[int] | None, device: torch.device) -> Span:
        """Places of the next tokens.

        Raises:
            ValueError: counts do not fit, or a sequence would become too long.
        """
        span = Span.following(
            self.lengths, [length] * len(self.lengths) if counts is None else counts, length, device
        )
        if max(span.ends, default=0) > self.max_tokens:
            raise ValueError(f"sequences may have {self.max_tokens} tokens, would have {list(span.ends)}")
        return span


class CompressedAttention(nn.Module):
    """One layer. Forward only.

    Sequences go through ``forward`` in portions of any size, tokens one by one included, with the same result
    to rounding.

    Args:
        config: shape of the layer.
        dtype: of the projections; norms, the sink and compressors are float32.
        impl: implementation of ``sparse_attn``.
    """

    def __init__(
        self,
        config: CompressedAttentionConfig,
        *,
        dtype: torch.dtype = torch.float32,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        self.config, self.impl = config, impl
        width, groups = config.heads * config.head_dim, config.out_groups

        def linear(channels: int, out: int) -> nn.Linear:
            return nn.Linear(channels, out, bias=False, dtype=dtype)

        self.attn_sink = nn.Parameter(torch.zeros(config.heads, dtype=torch.float32))
        self.wq_a = linear(config.dim, config.q_rank)
        self.q_norm = RMSNorm(config.q_rank, config.norm_eps)
        self.wq_b = linear(config.q_rank, width)
        self.wkv = linear(config.dim, config.head_dim)
        self.kv_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.wo_a = linear(width // groups, groups * config.out_rank)
        self.wo_b = linear(groups * config.out_rank, config.dim)
        self.compressor = self._new_compressor() if config.ratio else None
        self.indexer = self._new_indexer(dtype)
        self.requires_grad_(False)  # the kernel has no backward

    def _new_compressor(self) -> Compressor:
        config = self.config
        return Compressor(
            config.dim,
            config.head_dim,
            config.ratio,
            config.rotary,
            overlap=config.overlap,
            eps=config.norm_eps,
            quantization="fp8" if config.simulate_quantization else None,
        )

    def _new_indexer(self, dtype: torch.dtype) -> Indexer | None:
        config = self.config
        if config.index is None:
            return None
        return Indexer(
            config.index,
            config.dim,
            config.q_rank,
            config.ratio,
            config.rotary,
            overlap=config.overlap,
            eps=config.norm_eps,
            simulate_quantization=config.simulate_quantization,
            dtype=dtype,
        )

    def new_state(self, batch: int, max_tokens: int) -> AttentionState:
        """State of so many sequences that have no token yet and may get ``max_tokens`` each."""
        if batch < 1 or max_tokens < 1:
            raise ValueError(f"batch and max_tokens must be at least 1, got {batch} and {max_tokens}")
        config, weight = self.config, self.wkv.weight
        entries = entries_of(max_tokens, config.ratio) if config.ratio else 0
        return AttentionState(
            lengths=[0] * batch,
            max_tokens=max_tokens,
            cache=KVCache(batch, config.window, entries, config.head_dim, weight.dtype, weight.device),
            compressor=self.compressor.new_state(batch) if self.compressor else None,
            indexer=self.indexer.new_state(batch, max_tokens) if self.indexer else None,
        )

    def forward(self, x: Tensor, state: AttentionState, counts: Sequence[int] | None = None) -> Tensor:
        """Attend from the next tokens of each sequence, and remember them.

        Args:
            x: [batch, length, dim], dtype of the projections.
            state: of the tokens before; brought up to date.
            counts: new tokens of each sequence, in front of its padding; by default ``length``.

        Returns:
            [batch, length, dim]; 0 at padding.

        Raises:
            ValueError: shapes do not fit, or a sequence would become longer than the state allows.
        """
        batch = len(state.lengths)
        if x.ndim != 3 or x.shape[0] != batch or x.shape[2] != self.config.dim:
            raise ValueError(
                f"x must be [batch, length, dim] = [{batch}, length, {self.config.dim}], got {tuple(x.shape)}"
            )
        span = state.next_span(x.shape[1], counts, x.device)
        if span.length == 0:
            return x
        config = self.config
        turns = config.rotary.turns(span.positions)
        low_rank = self.q_norm(self.wq_a(x))
        q = self.wq_b(low_rank).unflatten(-1, (config.heads, config.head_dim))
        q = turns.of_heads().rotate(normalized(q, config.norm_eps))
        raw = turns.rotate(self.kv_norm(self.wkv(x)))
        if config.simulate_quantization:
            raw = fp8_but_rotary(raw, config.rotary)
        if self.compressor is not None and state.compressor is not None:
            state.cache.append(self.compressor(x, span, state.compressor), span, config.ratio)
        selected = None
        if self.indexer is not None and state.indexer is not None:
            selected = self.indexer(x, low_rank, turns, span, state.indexer)
        rows, lists = self._keys(raw, span, state, selected)
        out = sparse_attn(q, rows, self.attn_sink.float(), lists, config.head_dim**-0.5, impl=self.impl)
        if span.length > 1:
            state.cache.fill_ring(raw, span)
        state.lengths[:] = span.ends
        return self._project(turns.inverse.of_heads().rotate(out))

    def _keys(
        self, raw: Tensor, span: Span, state: AttentionState, selected: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The rows that these tokens may see, and which of them each does."""
        config, cache = self.config, state.cache
        width = min(config.window, max(span.ends))
        entries = max(span.ends) // config.ratio if config.ratio else 0
        if span.length == 1:
            # The new token takes the place of the one that leaves the window: nothing is copied.
            cache.fill_ring(raw, span)
            rows, offset = cache.rows, config.window
            lists = window_indices(span.positions, config.window, width)
        else:
            rows = torch.cat([cache.ring, raw, cache.entries[:, :entries]], dim=1)
            offset = config.window + span.length
            lists = window_indices(span.positions, config.window, width, span.first_positions)
        if selected is None:
            selected = (
                compressed_indices(span.positions, config.ratio, entries) if entries else lists[:, :, :0]
            )
        return rows, torch.cat([lists, shifted(selected, offset)], dim=2)

    def _project(self, out: Tensor) -> Tensor:
        """[batch, length, dim] from [batch, length, heads, head_dim]; a group of heads has its own matrix."""
        groups = self.config.out_groups
        grouped = out.flatten(2).unflatten(2, (groups, -1))
        weight = self.wo_a.weight.unflatten(0, (groups, -1))
        low_rank = torch.einsum("btgc,grc->btgr", grouped, weight)
        projected: Tensor = self.wo_b(low_rank.flatten(2))
        return projected

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, tensor in state_dict.items():
            if name.startswith(prefix) and (name.endswith(".scale") or tensor.dtype.itemsize < 2):
                raise ValueError(
                    f"{name} ({tensor.dtype}) is part of a quantised weight: "
                    f"multiply weights by their scales first"
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)
