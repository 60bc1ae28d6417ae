"""Sparse attention operators for video transformers, and the swap that puts them into a Diffusers model.

Knows tensors and token layouts. Does not know files, jobs or HTTP. ``import attention`` costs no torch
import: the names below are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention.anchor_local.api import anchor_local_attention, anchor_local_ordered
    from attention.anchor_local.backend import AnchorLocalBackend
    from attention.backends import Backend
    from attention.block_topk.api import block_topk_attention, block_topk_ordered
    from attention.block_topk.backend import BlockTopKBackend
    from attention.block_topk.boxes import BoxPattern
    from attention.block_topk.layout import BoxLayout, box_layout
    from attention.choice import check_precision
    from attention.layout import AnchorLocalLayout, anchor_local_layout
    from attention.parallel.ranks import RankGroup
    from attention.parallel.report import ParallelReport
    from attention.pattern import AnchorLocalPattern, density
    from attention.selected.api import sparse_attn
    from attention.selected.config import CompressedAttentionConfig
    from attention.selected.indexer import IndexConfig
    from attention.selected.module import CompressedAttention
    from attention.selected.rotary import Rotary, Yarn
    from attention.swapping import SwapHandle, SwapReport, check_ranks, swap
    from attention.tiles import TilePattern, tile_density
    from attention.window_sink.api import window_sink_attention
    from attention.window_sink.backend import WindowBackend
    from attention.window_sink.module import VisionAttentionConfig, WindowSinkAttention
    from attention.window_sink.patches import packed_patches

_HOME = {
    "AnchorLocalBackend": "attention.anchor_local.backend",
    "AnchorLocalLayout": "attention.layout",
    "AnchorLocalPattern": "attention.pattern",
    "Backend": "attention.backends",
    "BlockTopKBackend": "attention.block_topk.backend",
    "BoxLayout": "attention.block_topk.layout",
    "BoxPattern": "attention.block_topk.boxes",
    "CompressedAttention": "attention.selected.module",
    "CompressedAttentionConfig": "attention.selected.config",
    "IndexConfig": "attention.selected.indexer",
    "ParallelReport": "attention.parallel.report",
    "RankGroup": "attention.parallel.ranks",
    "Rotary": "attention.selected.rotary",
    "SwapHandle": "attention.swapping",
    "SwapReport": "attention.swapping",
    "TilePattern": "attention.tiles",
    "VisionAttentionConfig": "attention.window_sink.module",
    "WindowBackend": "attention.window_sink.backend",
    "WindowSinkAttention": "attention.window_sink.module",
    "Yarn": "attention.selected.rotary",
    "anchor_local_attention": "attention.anchor_local.api",
    "anchor_local_layout": "attention.layout",
    "anchor_local_ordered": "attention.anchor_local.api",
    "block_topk_attention": "attention.block_topk.api",
    "block_topk_ordered": "attention.block_topk.api",
    "box_layout": "attention.block_topk.layout",
    "check_precision": "attention.choice",
    "check_ranks": "attention.swapping",
    "density": "attention.pattern",
    "packed_patches": "attention.window_sink.patches",
    "sparse_attn": "attention.selected.api",
    "swap": "attention.swapping",
    "tile_density": "attention.tiles",
    "window_sink_attention": "attention.window_sink.api",
}
__all__ = [
    "AnchorLocalBackend",
    "AnchorLocalLayout",
    "AnchorLocalPattern",
    "Backend",
    "BlockTopKBackend",
    "BoxLayout",
    "BoxPattern",
    "CompressedAttention",
    "CompressedAttentionConfig",
    "IndexConfig",
    "ParallelReport",
    "RankGroup",
    "Rotary",
    "SwapHandle",
    "SwapReport",
    "TilePattern",
    "VisionAttentionConfig",
    "WindowBackend",
    "WindowSinkAttention",
    "Yarn",
    "anchor_local_attention",
    "anchor_local_layout",
    "anchor_local_ordered",
    "block_topk_attention",
    "block_topk_ordered",
    "box_layout",
    "check_precision",
    "check_ranks",
    "density",
    "packed_patches",
    "sparse_attn",
    "swap",
    "tile_density",
    "window_sink_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
