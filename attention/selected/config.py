"""Shape of a compressed attention layer. No tensors here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attention.selected.api import MAX_WIDTH
from attention.selected.indexer import IndexConfig
from attention.selected.quantization import FP4_BLOCK, FP8_BLOCK
from attention.selected.rotary import Rotary, Yarn

_ROTARY = Rotary(64)
_SELECTED_RATIO = 4  # in published models the windows of this ratio overlap and have an indexer
# What is read of a published config: of every layer, of those that compress, and of those that select.
_PUBLISHED = (
    *("compress_ratios", "dim", "n_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank"),
    *("window_size", "rope_head_dim", "rope_theta"),
)
_PUBLISHED_COMPRESSED = (
    "original_seq_len",
    "rope_factor",
    "beta_fast",
    "beta_slow",
    "compress_rope_theta",
)
_PUBLISHED_INDEX = ("index_n_heads", "index_head_dim", "index_topk")


@dataclass(frozen=True, slots=True)
class CompressedAttentionConfig:
    """One layer of DeepSeek-V4's attention; the defaults are a layer with a plain window.

    Attributes:
        dim: channels of a token.
        heads, head_dim: query heads and their channels; the one key/value head has as many.
        q_rank: channels of the low-rank query.
        out_groups, out_rank: groups of heads with an output projection of their own, and its rank.
        window: raw tokens that a token sees, its own included.
        ratio: tokens of a compressed entry; 0 is no compression.
        overlap: whether a window of ``ratio`` tokens also takes part in the next entry.
        index: the indexer that selects entries; without one a token sees all that are visible.
        rotary: of the last channels of queries, rows and entries; of an index head too.
        norm_eps: of all normalisations.
        simulate_quantization: cached rows are rounded as FP8, those of the indexer as FP4.

    Raises:
        ValueError: values do not fit each other.
    """

    dim: int = 4096
    heads: int = 64
    head_dim: int = 512
    q_rank: int = 1024
    out_groups: int = 8
    out_rank: int = 1024
    window: int = 128
    ratio: int = 0
    overlap: bool = False
    index: IndexConfig | None = None
    rotary: Rotary = _ROTARY
    norm_eps: float = 1e-6
    simulate_quantization: bool = False

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "head_dim", "q_rank", "out_groups", "out_rank", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.ratio < 0:
            raise ValueError(f"ratio must be at least 0, got {self.ratio}")
        if self.ratio == 0 and (self.overlap or self.index is not None):
            raise ValueError("overlap and index need a ratio, got ratio 0")
        if self.head_dim > MAX_WIDTH:
            raise ValueError(f"head_dim must be at most {MAX_WIDTH}, got {self.head_dim}")
        if self.heads % self.out_groups:
            raise ValueError(f"out_groups must divide heads = {self.heads}, got {self.out_groups}")
        widths = [self.head_dim, *([self.index.head_dim] if self.index else [])]
        if self.rotary.dims > min(widths):
            raise ValueError(f"rotary dims must be at most {min(widths)}, got {self.rotary.dims}")
        if self.simulate_quantization:
            self._check_blocks()

    def _check_blocks(self) -> None:
        kept = self.head_dim - self.rotary.dims
        if kept % FP8_BLOCK:
            raise ValueError(
                f"to simulate FP8, head_dim less rotary dims must be a multiple of {FP8_BLOCK}, got {kept}"
            )
        if self.index and (self.index.head_dim < FP4_BLOCK or self.index.head_dim.bit_count() != 1):
            raise ValueError(
                f"to simulate FP4, index head_dim must be a power of two, at least {FP4_BLOCK}, "
                f"got {self.index.head_dim}"
            )

    @classmethod
    def from_published(
        cls, arguments: Mapping[str, Any], layer: int, *, simulate_quantization: bool = False
    ) -> "CompressedAttentionConfig":
        """Read a layer from the config.json of the published inference code.

        Raises:
            ValueError: it lacks a name, or the layer.
        """
        _check_published(arguments, layer)
        ratio = arguments["compress_ratios"][layer]
        selects = ratio == _SELECTED_RATIO
        return cls(
            dim=arguments["dim"],
            heads=arguments["n_heads"],
            head_dim=arguments["head_dim"],
            q_rank=arguments["q_lora_rank"],
            out_groups=arguments["o_groups"],
            out_rank=arguments["o_lora_rank"],
            window=arguments["window_size"],
            ratio=ratio,
            overlap=selects,
            index=_published_index(arguments) if selects else None,
            rotary=_published_rotary(arguments, compressed=ratio > 0),
            norm_eps=arguments.get("norm_eps", 1e-6),
            simulate_quantization=simulate_quantization,
        )


def _check_published(arguments: Mapping[str, Any], layer: int) -> None:
    needed = [*_PUBLISHED]
    ratios = arguments.get("compress_ratios")
    if ratios is not None:
        if not 0 <= layer < len(ratios):
            raise ValueError(f"layer must be 0 .. {len(ratios) - 1}, got {layer}")
        needed += _PUBLISHED_COMPRESSED if ratios[layer] > 0 else ()
        needed += _PUBLISHED_INDEX if ratios[layer] == _SELECTED_RATIO else ()
    if lacking := [name for name in needed if name not in arguments]:
        raise ValueError(
            f"the config lacks {', '.join(lacking)}: "
            "it must be the config.json of the published inference code"
        )


def _published_index(arguments: Mapping[str, Any]) -> IndexConfig:
    return IndexConfig(arguments["index_n_heads"], arguments["index_head_dim"], arguments["index_topk"])


def _published_rotary(arguments: Mapping[str, Any], compressed: bool) -> Rotary:
    """Layers with a plain window have a theta of their own and no YaRN."""
    dims = arguments["rope_head_dim"]
    if not compressed:
        return Rotary(dims, arguments["rope_theta"])
    yarn = None
    if arguments["original_seq_len"] > 0:
        yarn = Yarn(
            arguments["original_seq_len"],
            arguments["rope_factor"],
            arguments["beta_fast"],
            arguments["beta_slow"],
        )
    return Rotary(dims, arguments["compress_rope_theta"], yarn)
