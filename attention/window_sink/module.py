"""Vision attention in the shape of MiMo-V2.5: one block's fused projections, rotary, window and sinks.

Names and shapes of the parameters are those of the published checkpoint, where block i has the prefix
``visual.blocks.{i}.attn.``:

    qkv.weight, qkv.bias    (heads + 2 kv_heads) * head_dim rows: query heads, key heads, value heads
    proj.weight, proj.bias  hidden_size rows, heads * head_dim columns
    sinks                   [heads], only in blocks with a window

Full tensors load into a shard: it takes its heads and leaves the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attention.choice import Impl
from attention.window_sink.api import window_sink_attention
from attention.window_sink.patches import PackedPatches
from attention.window_sink.sinks import SinkMode


@dataclass(frozen=True, slots=True)
class VisionAttentionConfig:
    """Attention of a whole vision encoder.

    Attributes:
        hidden_size: channels of a token.
        heads, kv_heads: query heads and key/value heads, each of ``head_dim`` channels.
        window: a token sees this many tokens on either side, in all blocks but the full ones.
        full_blocks: indexes of the blocks with full attention; they have no sinks.
        column_blocks: indexes of the blocks whose window runs along columns instead of rows.
        sinks: whether blocks with a window have sinks.
        sink_mode: what the sinks mean.

    Raises:
        ValueError: values do not fit each other.
    """

    hidden_size: int = 1280
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    window: int = 64
    full_blocks: tuple[int, ...] = (0, 9, 18, 27)
    column_blocks: tuple[int, ...] = ()
    sinks: bool = True
    sink_mode: SinkMode = "key0_bias"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "heads", "kv_heads", "head_dim", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if both := set(self.full_blocks) & set(self.column_blocks):
            raise ValueError(
                f"a block has full attention or a window along columns, not both: {sorted(both)}"
            )

    @classmethod
    def from_checkpoint(cls, vision_config: Mapping[str, Any]) -> "VisionAttentionConfig":
        """Read ``vision_config`` of the checkpoint's config.json. Raises KeyError for a name it lacks."""
        full_blocks = tuple(vision_config["fullatt_block_indexes"])
        types = enumerate(vision_config["vit_window_attn_types"])
        return cls(
            hidden_size=vision_config["hidden_size"],
            heads=vision_config["num_heads"],
            kv_heads=vision_config["num_key_value_heads"],
            head_dim=vision_config.get("qk_channels", 64),  # absent from the published file
            window=vision_config["visual_token_window_size"],
            full_blocks=full_blocks,
            column_blocks=tuple(block for block, kind in types if kind == 1 and block not in full_blocks),
            sinks=vision_config["use_sink"],
        )


class WindowSinkAttention(nn.Module):
    """One block's attention, or one shard of its heads. Forward only.

    Args:
        config: attention of the encoder.
        block: index of the block; it decides between full, row and column windows.
        shard: (rank, ranks); ranks divides kv_heads. The outputs of all ranks sum to the unsharded output.
        impl: implementation of ``window_sink_attention``.

    Raises:
        ValueError: the heads cannot be sharded so.
    """

    def __init__(
        self,
        config: VisionAttentionConfig,
        block: int,
        *,
        shard: tuple[int, int] = (0, 1),
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        rank, ranks = shard
        if ranks < 1 or not 0 <= rank < ranks:
            raise ValueError(f"shard must be (rank, ranks) with 0 <= rank < ranks, got {shard}")
        if config.kv_heads % ranks:
            raise ValueError(f"ranks must divide kv_heads = {config.kv_heads}, got {ranks}")
        self.config, self.block, self.shard, self.impl = config, block, shard, impl
        self.is_full = block in config.full_blocks
        self.heads, self.kv_heads = config.heads // ranks, config.kv_heads // ranks
        self.qkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * config.head_dim)
        self.proj = nn.Linear(self.heads * config.head_dim, config.hidden_size, bias=rank == 0)
        self.sinks: nn.Parameter | None = None
        if config.sinks and not self.is_full:
            self.sinks = nn.Parameter(torch.zeros(self.heads))
        self.requires_grad_(False)  # the kernel has no backward

    def forward(self, x: Tensor, patches: PackedPatches) -> Tensor:
        """Attend within each frame.

        Args:
            x: [tokens, hidden_size] in row order.
            patches: tables of these tokens.

        Returns:
            [tokens, hidden_size] in row order; a shard's part of it if sharded.
        """
        if x.ndim != 2 or x.shape != (patches.tokens, self.config.hidden_size):
            raise ValueError(
                f"x must be [tokens, hidden_size] = [{patches.tokens}, {self.config.hidden_size}], "
                f"got {tuple(x.shape)}"
            )
        qkv = self.qkv(x).unflatten(1, (-1, self.config.head_dim))
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(q, patches.cos, patches.sin), rotate(k, patches.cos, patches.sin)
        in_columns = self.block in self.config.column_blocks
        if in_columns:
            q, k, v = (part[patches.column_order] for part in (q, k, v))
        side = None if self.is_full else self.config.window
        out = window_sink_attention(
            q,
            k,
            v,
            patches.cu_seqlens,
            window=(side, side),
            sinks=None if self.sinks is None else self.sinks.float(),
            sink_mode=None if self.sinks is None else self.config.sink_mode,
            impl=self.impl,
        )
        if in_columns:
            out = out[patches.column_inverse]
        projected: Tensor = self.proj(out.flatten(1))
        return projected

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if self.sinks is None and f"{prefix}sinks" in state_dict:
            why = "has full attention" if self.is_full else "was built with sinks=False"
            raise ValueError(f"{prefix}sinks would not be used: block {self.block} {why}")
        if self.shard[1] > 1:
            self._take_shard(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _take_shard(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Cut the full tensors of a checkpoint to this shard's heads."""
        rank, ranks = self.shard
        q_rows, kv_rows = (
            heads * self.config.head_dim for heads in (self.config.heads, self.config.kv_heads)
        )

        def take(name: str, dim: int, *sizes: int) -> None:
            full = state_dict.get(prefix + name)
            if full is None:
                return
            if full.shape[dim] != sum(sizes):
                raise ValueError(
                    f"{prefix}{name} must be the full tensor, with {sum(sizes)} in dimension {dim}, "
                    f"got shape {tuple(full.shape)}"
                )
            parts = full.split(sizes, dim)
            state_dict[prefix + name] = torch.cat([part.chunk(ranks, dim)[rank] for part in parts], dim)

        take("qkv.weight", 0, q_rows, kv_rows, kv_rows)
        take("qkv.bias", 0, q_rows, kv_rows, kv_rows)
        take("proj.weight", 1, q_rows)
        take("sinks", 0, self.config.heads)
        if rank > 0:  # the first shard adds the bias, once for all
            state_dict.pop(f"{prefix}proj.bias", None)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (i, i + head_dim / 2) of x [tokens, heads, head_dim], in float32 or wider."""
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
