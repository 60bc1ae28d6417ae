"""The output norm in slices: bit for bit the same, in less memory, and gone afterwards."""

from typing import Any

import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm
from torch import Tensor, nn

from pipelines import output_norm
from pipelines.output_norm import PostponedNorm, sliced_output_norm
from tests.pipelines.live_bytes import LiveBytes
from tests.tiny_wan import LATENT_CHANNELS, TEXT_DIM, tiny_transformer


def one_pass(transformer: Any, timestep: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    batch = timestep.shape[0]
    with torch.no_grad():
        out: Tensor = transformer(
            hidden_states=torch.randn(batch, LATENT_CHANNELS, 3, 8, 8, generator=generator).bfloat16(),
            timestep=timestep,
            encoder_hidden_states=torch.randn(batch, 8, TEXT_DIM, generator=generator).bfloat16(),
            return_dict=False,
        )[0]
    return out


@pytest.mark.parametrize("size", [1, 7, 16, 4096])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("by_token", [False, True])
def test_a_pass_is_the_same_bit_for_bit(
    size: int, batch: int, by_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_norm, "SLICE_TOKENS", size)
    transformer = tiny_transformer().bfloat16()
    timestep = torch.linspace(1, 999, 48).expand(batch, 48) if by_token else torch.full((batch,), 500.0)
    expected = one_pass(transformer, timestep)
    with sliced_output_norm([transformer, nn.Linear(1, 1)]):
        assert type(transformer.norm_out) is PostponedNorm
        assert torch.equal(one_pass(transformer, timestep), expected)
    assert type(transformer.norm_out) is FP32LayerNorm
    assert torch.equal(one_pass(transformer, timestep), expected)


def test_a_watched_norm_is_left_alone() -> None:
    transformer = tiny_transformer()
    transformer.norm_out.register_forward_hook(lambda *args: None)
    with sliced_output_norm([transformer]):
        assert type(transformer.norm_out) is FP32LayerNorm


def test_less_than_the_float32_copies_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_norm, "SLICE_TOKENS", 16)
    transformer = tiny_transformer()
    hidden = torch.randn(1, 1024, 64).bfloat16()
    scale = torch.randn(1, 1, 64)

    def tail() -> Tensor:
        out: Tensor = (transformer.norm_out(hidden.float()) * (1 + scale) + scale).type_as(hidden)
        return out

    peaks = []
    with torch.no_grad():
        with LiveBytes() as count:
            expected = tail()
        peaks.append(count.peak)
        with sliced_output_norm([transformer]), LiveBytes() as count:
            found = tail()
        peaks.append(count.peak)
    assert torch.equal(found, expected)
    float32 = 4 * hidden.numel()
    assert peaks[0] >= 2 * float32
    assert peaks[1] < 1.1 * float32  # the copy that is dropped at once


def test_another_expression_is_an_error() -> None:
    transformer = tiny_transformer()
    with (
        sliced_output_norm([transformer]),
        pytest.raises(RuntimeError, match="not modulated as was expected"),
    ):
        transformer.norm_out(torch.ones(1, 2, 64)).type_as(torch.ones(1, 2, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("affine", [False, True])
def test_on_a_gpu_one_kernel_says_the_same(affine: bool) -> None:
    norm = PostponedNorm(1536, eps=1e-6, elementwise_affine=affine).cuda()
    hidden = torch.randn(2, 4_097, 1536, device="cuda", dtype=torch.bfloat16)
    factor, shift = torch.randn(2, 2, 1, 1536, device="cuda", dtype=torch.bfloat16)
    expected = (norm.now(hidden.float()) * factor + shift).bfloat16()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = (norm(hidden) * factor + shift).type_as(hidden)
    # The result and a modulation; a float32 copy alone would be twice the result.
    assert torch.cuda.max_memory_allocated() - before < 1.5 * found.numel() * found.element_size()
    # Sums differ in the last bits of float32, so that a result is rounded the other way here and there.
    assert (found == expected).float().mean() > 0.999
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
