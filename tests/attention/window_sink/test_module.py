"""The vision attention module against a dense computation written from the checkpoint's description."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attention import VisionAttentionConfig, WindowSinkAttention, packed_patches
from attention.window_sink.patches import PackedPatches

BLOCKS = 28
FULL, ROW, COLUMN = 9, 3, 5
CONFIG = VisionAttentionConfig(
    hidden_size=40, heads=8, kv_heads=4, head_dim=16, window=6, column_blocks=(COLUMN, 6, 20)
)
GRIDS = [(2, 4, 6), (1, 8, 2)]
PATCHES = packed_patches(GRIDS, head_dim=16)


def synthetic_checkpoint(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random weights under the names of the published checkpoint."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for block in range(BLOCKS):
        prefix = f"visual.blocks.{block}.attn."
        state[f"{prefix}qkv.weight"] = torch.randn(16 * 16, 40, generator=generator) * 0.3
        state[f"{prefix}qkv.bias"] = torch.randn(16 * 16, generator=generator)
        state[f"{prefix}proj.weight"] = torch.randn(40, 8 * 16, generator=generator) * 0.1
        state[f"{prefix}proj.bias"] = torch.randn(40, generator=generator)
        if block not in (0, 9, 18, 27):
            state[f"{prefix}sinks"] = 2 * torch.randn(8, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in state.items()}


class Encoder(nn.Module):
    """As much of the encoder as holds its attention."""

    def __init__(self, shard: tuple[int, int] = (0, 1)) -> None:
        super().__init__()
        self.visual = nn.Module()
        self.visual.blocks = nn.ModuleList(nn.Module() for _ in range(BLOCKS))
        for index, block in enumerate(self.visual.blocks):
            block.attn = WindowSinkAttention(CONFIG, index, shard=shard)
        self.double()

    def block(self, index: int) -> WindowSinkAttention:
        """Attention of a block."""
        attention = self.get_submodule(f"visual.blocks.{index}.attn")
        assert isinstance(attention, WindowSinkAttention)
        return attention


def dense_attention(state: dict[str, Tensor], block: int, x: Tensor, patches: PackedPatches) -> Tensor:
    """One block, frame by frame and head by head, with the mask and the bias of key 0 written out."""
    weights = {name.rpartition(f".{block}.attn.")[2]: tensor for name, tensor in state.items()}
    in_columns = block in (COLUMN, 6, 20)
    order = patches.column_order if in_columns else torch.arange(len(x))
    x, cos, sin = x[order], patches.cos[order].double(), patches.sin[order].double()
    qkv = (x @ weights["qkv.weight"].T + weights["qkv.bias"]).view(-1, 16, 16)

    def turned(part: Tensor) -> Tensor:
        half = torch.cat([-part[:, 8:], part[:, :8]], dim=1)
        return part * torch.cat([cos, cos], 1) + half * torch.cat([sin, sin], 1)

    heads = []
    for head in range(8):
        q, k, v = turned(qkv[:, head]), turned(qkv[:, 8 + head // 2]), qkv[:, 12 + head // 2]
        frames = []
        for begin, end in ((0, 24), (24, 48), (48, 64)):
            scores = q[begin:end] @ k[begin:end].T / 4
            if block not in (0, 9, 18, 27):
                scores[:, 0] += weights["sinks"][head]
                far = torch.ones_like(scores).triu(7) + torch.ones_like(scores).tril(-7)
                scores = scores.masked_fill(far > 0, float("-inf"))
            frames.append(scores.softmax(1) @ v[begin:end])
        heads.append(torch.cat(frames))
    out = torch.cat(heads, 1) @ weights["proj.weight"].T + weights["proj.bias"]
    return out[order.argsort()]


def tokens() -> Tensor:
    return torch.randn(64, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_every_block_of_a_loaded_checkpoint(tmp_path: Path) -> None:
    save_file(synthetic_checkpoint(), tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    encoder = Encoder()
    encoder.load_state_dict(state)
    x = tokens()
    for index in range(BLOCKS):
        only = {name: tensor for name, tensor in state.items() if f".blocks.{index}." in name}
        torch.testing.assert_close(encoder.block(index)(x, PATCHES), dense_attention(only, index, x, PATCHES))


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_sum_to_the_whole(ranks: int) -> None:
    state = synthetic_checkpoint()
    whole = Encoder()
    whole.load_state_dict(state)
    shards = [Encoder((rank, ranks)) for rank in range(ranks)]
    for shard in shards:
        shard.load_state_dict(state)
    x = tokens()
    for block in (FULL, ROW, COLUMN):
        parts = [shard.block(block)(x, PATCHES) for shard in shards]
        torch.testing.assert_close(torch.stack(parts).sum(0), whole.block(block)(x, PATCHES))
    sinks = shards[1].block(ROW).sinks
    assert sinks is not None
    assert torch.equal(sinks, state[f"visual.blocks.{ROW}.attn.sinks"][8 // ranks : 16 // ranks].float())
    assert len(state) == len(synthetic_checkpoint())  # loading left the caller's dictionary as it was


def test_low_precision_stays_close() -> None:
    state = synthetic_checkpoint()
    encoder = Encoder()
    encoder.load_state_dict(state)
    x = tokens()
    for block in (FULL, ROW, COLUMN):
        exact = encoder.block(block)(x, PATCHES)
        encoder.block(block).bfloat16()
        out = encoder.block(block)(x.bfloat16(), PATCHES)
        assert out.dtype == torch.bfloat16
        assert (
            out.double() - exact
        ).norm() / exact.norm() < 2e-2  # two projections and attention in bfloat16


@pytest.mark.parametrize("strict", [True, False])
def test_sinks_that_nothing_would_use_are_refused(strict: bool) -> None:
    state = synthetic_checkpoint()
    state[f"visual.blocks.{FULL}.attn.sinks"] = torch.zeros(8)
    with pytest.raises(
        ValueError, match=r"blocks\.9\.attn\.sinks would not be used: block 9 has full attent"
    ):
        Encoder().load_state_dict(state, strict=strict)
    without = WindowSinkAttention(VisionAttentionConfig(hidden_size=40, sinks=False), ROW)
    with pytest.raises(ValueError, match="sinks would not be used: block 3 was built with sinks=False"):
        without.load_state_dict({"sinks": torch.zeros(32)}, strict=strict)


@pytest.mark.parametrize("name", ["sinks", "qkv.bias", "proj.weight"])
def test_a_checkpoint_must_have_every_parameter(name: str) -> None:
    state = synthetic_checkpoint()
    del state[f"visual.blocks.{ROW}.attn.{name}"]
    for shard in ((0, 1), (1, 2)):
        with pytest.raises(
            RuntimeError, match=rf'Missing key\(s\) in state_dict: "visual.blocks.3.attn.{name}"'
        ):
            Encoder(shard).load_state_dict(state)


def test_a_shard_takes_only_full_tensors() -> None:
    state = synthetic_checkpoint()
    state[f"visual.blocks.{ROW}.attn.sinks"] = torch.zeros(4)
    with pytest.raises(
        ValueError, match=r"sinks must be the full tensor, with 8 in dimension 0, got shape \(4,\)"
    ):
        Encoder((0, 2)).load_state_dict(state)


def test_the_mode_of_sinks_is_the_configured_one() -> None:
    state = {
        name.rpartition(".3.attn.")[2]: tensor
        for name, tensor in synthetic_checkpoint().items()
        if ".3.attn." in name
    }
    outputs = []
    for mode in ("null_logit", "key0_bias"):
        config = VisionAttentionConfig(
            hidden_size=40, heads=8, kv_heads=4, head_dim=16, window=6, sink_mode=mode
        )
        module = WindowSinkAttention(config, ROW).double()
        module.load_state_dict(state)
        outputs.append(module(tokens(), PATCHES))
    assert (outputs[0] - outputs[1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("shard", "message"), [((2, 2), "0 <= rank < ranks, got"), ((0, 3), "ranks must divide")]
)
def test_shards_that_cannot_be(shard: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WindowSinkAttention(CONFIG, ROW, shard=shard)


def test_tokens_must_be_those_of_the_patches() -> None:
    with pytest.raises(ValueError, match=r"x must be \[tokens, hidden_size\] = \[64, 40\], got \(63, 40\)"):
        WindowSinkAttention(CONFIG, ROW)(torch.zeros(63, 40), PATCHES)


def test_configuration_of_the_published_file() -> None:
    published = {
        "depth": 28,
        "hidden_size": 1280,
        "num_heads": 32,
        "num_key_value_heads": 8,
        "visual_token_window_size": 64,
        "fullatt_block_indexes": [0, 9, 18, 27],
        "vit_window_attn_types": [-1, 0, 1, 1, 0, 0, 0, 0, 0, 1] + [0] * 18,
        "use_sink": True,
    }
    assert VisionAttentionConfig.from_checkpoint(published) == VisionAttentionConfig(column_blocks=(2, 3))
    assert VisionAttentionConfig.from_checkpoint(published | {"qk_channels": 80}).head_dim == 80


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"kv_heads": 5}, "heads must be a multiple of kv_heads, got 32 and 5"),
        ({"column_blocks": (1, 9)}, r"full attention or a window along columns, not both: \[9\]"),
    ],
)
def test_configurations_that_do_not_fit(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VisionAttentionConfig(**changed)  # type: ignore[arg-type]
