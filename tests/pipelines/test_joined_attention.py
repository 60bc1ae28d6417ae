"""q, k and v of one product: the same pass, which models are left alone, and the way back."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttention, WanRotaryPosEmbed
from peft import LoraConfig
from torch import Tensor, nn
from torch.testing import assert_close

from attention import swap
from pipelines.fp8 import Fp8Linear, to_fp8
from pipelines.joined_attention import JoinedAttention, join_projections, norm_and_rotate_, part_projections
from tests.tiny_wan import LATENT_CHANNELS, TEXT_DIM, tiny_transformer


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def transformer() -> Any:
    return tiny_transformer().double()


def one_pass(transformer: Any, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    dtype = transformer.dtype
    out: Tensor = transformer(
        hidden_states=torch.randn(batch, LATENT_CHANNELS, 3, 8, 8, generator=generator).to(dtype),
        timestep=torch.full((batch,), 500.0),
        encoder_hidden_states=torch.randn(batch, 8, TEXT_DIM, generator=generator).to(dtype),
        return_dict=False,
    )[0]
    return out


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_pass_is_the_same_before_joined_and_after(transformer: Any, batch: int, swapped: bool) -> None:
    def ran() -> Tensor:
        if not swapped:
            return one_pass(transformer, batch)
        with swap(transformer, "anchor_local", token_order="tile", tile_thw=(1, 2, 2), anchor_stride=3):
            return one_pass(transformer, batch)

    weights = {name: weight.clone() for name, weight in transformer.state_dict().items()}
    expected = ran()
    assert join_projections(transformer) == len(transformer.blocks)
    assert {type(block.attn1) for block in transformer.blocks} == {JoinedAttention}
    assert sum(weight.numel() for weight in weights.values()) == sum(
        weight.numel() for weight in transformer.state_dict().values()
    )
    # Tables are float32, and both ways multiply in float64.
    assert_close(ran(), expected, rtol=0, atol=1e-12)
    part_projections(transformer)
    after = transformer.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weight) for name, weight in weights.items())
    assert {type(block.attn1) for block in transformer.blocks} == {WanAttention}
    assert type(transformer.rope) is WanRotaryPosEmbed
    assert torch.equal(ran(), expected)


def test_another_processor_gets_full_tables(transformer: Any) -> None:
    expected = one_pass(transformer)
    join_projections(transformer)

    class Mine(type(transformer.blocks[0].attn1.processor)):  # type: ignore[misc]
        """Of somebody who changed what attention does."""

    for block in transformer.blocks:
        block.attn1.processor = Mine()
    assert_close(one_pass(transformer), expected, rtol=0, atol=1e-12)


def test_a_lora_is_left_alone(transformer: Any) -> None:
    transformer.add_adapter(LoraConfig(r=2, target_modules=["blocks.1.attn1.to_v"], init_lora_weights=False))
    expected = one_pass(transformer)
    assert join_projections(transformer) == 0
    assert torch.equal(one_pass(transformer), expected)


def test_watched_and_mixed_layers_are_left_alone(transformer: Any) -> None:
    handle = transformer.blocks[0].attn1.to_k.register_forward_hook(lambda *args: None)
    assert join_projections(transformer) == 0
    handle.remove()
    transformer.blocks[0].attn1.norm_q.float()
    assert join_projections(transformer) == 0
    assert join_projections(nn.Linear(2, 2)) == 0


def test_fp8_quantises_the_joined_layer_once() -> None:
    transformer = tiny_transformer().bfloat16()
    truth = one_pass(transformer).float()
    join_projections(transformer)
    layers = to_fp8(transformer.blocks)
    # Of a block: q, k and v in one, output; q, k, v, output of cross-attention; two of the feed-forward.
    assert layers == 8 * len(transformer.blocks)
    assert type(transformer.blocks[0].attn1.to_qkv) is Fp8Linear
    error = (one_pass(transformer).float() - truth).norm() / truth.norm()
    assert 0 < error < 0.05
    with pytest.raises(ValueError, match="is a Fp8Linear by now"):
        part_projections(transformer)


def test_the_operator_says_what_it_does() -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 5, 3 * 24, generator=generator)
    weights = [torch.rand(24, generator=generator) for _ in range(2)]
    tables = [torch.randn(1, 5, 1, 4, generator=generator) for _ in range(2)]
    torch.library.opcheck(norm_and_rotate_, (qkv, *weights, *tables, 3, 1e-6))
