"""Configurations: the published one, and those that do not fit."""

from typing import Any

import pytest

from attention.selected.config import CompressedAttentionConfig
from attention.selected.indexer import IndexConfig
from attention.selected.rotary import Rotary, Yarn

PUBLISHED: dict[str, Any] = {
    "dim": 7168,
    "n_heads": 128,
    "head_dim": 512,
    "rope_head_dim": 64,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "o_lora_rank": 1024,
    "window_size": 128,
    "compress_ratios": [128, 4, 0],
    "compress_rope_theta": 160000.0,
    "original_seq_len": 65536,
    "rope_theta": 10000.0,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 1024,
}


def test_layers_of_a_published_configuration() -> None:
    all_seen, selected, window = (CompressedAttentionConfig.from_published(PUBLISHED, i) for i in range(3))
    compressed = Rotary(64, 160000.0, Yarn(65536, 16, 32, 1))
    assert (all_seen.ratio, all_seen.overlap, all_seen.index, all_seen.rotary) == (
        128,
        False,
        None,
        compressed,
    )
    assert (selected.ratio, selected.overlap, selected.rotary) == (4, True, compressed)
    assert selected.index == IndexConfig(64, 128, 1024)
    assert (window.ratio, window.index, window.rotary) == (0, None, Rotary(64, 10000.0))
    assert (selected.dim, selected.heads, selected.q_rank) == (7168, 128, 1536)
    assert (selected.out_groups, selected.out_rank, selected.window) == (16, 1024, 128)
    unscaled = CompressedAttentionConfig.from_published(PUBLISHED | {"original_seq_len": 0}, 1)
    assert unscaled.rotary == Rotary(64, 160000.0)
    with pytest.raises(ValueError, match="the config lacks q_lora_rank: it must be"):
        CompressedAttentionConfig.from_published(
            {name: value for name, value in PUBLISHED.items() if name != "q_lora_rank"}, 0
        )
    with pytest.raises(ValueError, match="the config lacks compress_ratios, dim, n_heads"):
        CompressedAttentionConfig.from_published({"hidden_size": 4096}, 0)
    layers = len(PUBLISHED["compress_ratios"])
    for layer in (-1, layers):
        with pytest.raises(ValueError, match=f"layer must be 0 .. {layers - 1}, got {layer}"):
            CompressedAttentionConfig.from_published(PUBLISHED, layer)


def test_the_published_shape_can_be_quantised() -> None:
    for layer in range(3):
        CompressedAttentionConfig.from_published(PUBLISHED, layer, simulate_quantization=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"ratio": -1}, "ratio must be at least 0, got -1"),
        ({"overlap": True}, "overlap and index need a ratio, got ratio 0"),
        ({"index": IndexConfig()}, "overlap and index need a ratio, got ratio 0"),
        ({"head_dim": 577}, "head_dim must be at most 576, got 577"),
        ({"out_groups": 7}, "out_groups must divide heads = 64, got 7"),
        ({"rotary": Rotary(514)}, "rotary dims must be at most 512, got 514"),
        ({"ratio": 4, "index": IndexConfig(head_dim=32)}, "rotary dims must be at most 32, got 64"),
        ({"head_dim": 500, "simulate_quantization": True}, "must be a multiple of 64, got 436"),
        (
            {"ratio": 4, "index": IndexConfig(head_dim=96), "simulate_quantization": True},
            "must be a power of two, at least 32, got 96",
        ),
    ],
)
def test_configurations_that_do_not_fit(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompressedAttentionConfig(**changed)
