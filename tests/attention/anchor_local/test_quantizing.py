"""Quantised tensors against their definition in PyTorch; and where values lie."""

import pytest
import torch

from attention import AnchorLocalPattern, anchor_local_layout
from attention.anchor_local.quantizing import E4M3_MOST, INT8_MOST, QuantizingConfig, quantized
from attention.anchor_local.value_columns import ALIGNMENT, ValueColumns, value_columns
from attention.layout import AnchorLocalLayout, frames_layout
from tests.attention.anchor_local.helpers import DEVICE


def assert_rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """int8, rounded to the nearest; the one halfway between two may go to either."""
    assert found.dtype == torch.int8
    assert (found.double() - exact).abs().max() <= 0.5 + 1e-4


# More tokens than one chunk of the first pass; grouped heads; a head_dim that is filled up.
@pytest.mark.parametrize(
    ("batch", "queries", "tokens", "heads", "kv_heads", "head_dim"),
    [(2, 70, 100, 4, 2, 24), (1, 600, 600, 1, 1, 32)],
)
def test_is_the_definition(
    batch: int, queries: int, tokens: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q = random(batch, queries, heads, head_dim).to(DEVICE, torch.bfloat16)
    k = (random(batch, tokens, kv_heads, head_dim) + 3 * random(head_dim)).to(DEVICE, torch.bfloat16)
    v = (random(batch, tokens, kv_heads, head_dim) * random(head_dim)).to(DEVICE, torch.bfloat16)
    pattern = AnchorLocalPattern(37, 5, 1)
    columns = value_columns(anchor_local_layout(pattern, tokens, q.device, 0, queries), q.device)
    found = quantized(q, k, v, columns)

    q_scale = q.float().abs().amax(-1, keepdim=True) / INT8_MOST
    assert_rounded(found.q[..., :head_dim], q.double() / q_scale.double())
    assert not found.q[..., head_dim:].any()
    torch.testing.assert_close(found.q_scale, q_scale[..., 0].transpose(1, 2))

    centred = k.float() - k.float().mean(1, keepdim=True)
    k_scale = centred.abs().amax((1, 3), keepdim=True) / INT8_MOST
    # The kernel adds the mean up in another order: the values differ a little before they are rounded.
    assert_rounded(found.k[..., :head_dim], centred.double() / k_scale.double())
    torch.testing.assert_close(found.k_scale, k_scale[:, 0, :, 0])

    v_scale = v.float().abs().amax(1, keepdim=True) / E4M3_MOST
    scaled = v.float() * (1 / found.v_scale[:, :, :head_dim].reshape(batch, 1, kv_heads, head_dim))
    narrow = scaled.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).float()
    narrow = narrow.permute(0, 2, 3, 1)  # [batch, kv_heads, head_dim, tokens]
    values = found.v.float()
    assert torch.equal(values[:, :, :head_dim, :tokens], narrow)
    used = columns.sources >= 0
    assert torch.equal(values[:, :, :head_dim, used], narrow[..., columns.sources[used].long()])
    assert not values[..., ~used].any()
    assert not values[:, :, head_dim:].any()
    torch.testing.assert_close(found.v_scale[..., :head_dim], v_scale[:, 0])


@pytest.mark.parametrize("value", [0.0, 1e-20, 3e4])
def test_constant_tensors_have_finite_scales(value: float) -> None:
    x = torch.full((1, 20, 1, 32), value, device=DEVICE)
    columns = value_columns(anchor_local_layout(AnchorLocalPattern(5, 3), 20, x.device), x.device)
    found = quantized(x, x, x, columns)
    for scale in (found.q_scale, found.k_scale, found.v_scale):
        assert bool(scale.isfinite().all() & (scale > 0).all())
    torch.testing.assert_close(found.v.float()[0, 0, 0, :20] * found.v_scale[0, 0, 0], x[0, :, 0, 0])


# The one of many tokens, and others; the default of so few tokens is the one they are held against.
@pytest.mark.parametrize(
    "config",
    [QuantizingConfig(512, 128, 1, 8), QuantizingConfig(64, 32, 3, 4), QuantizingConfig(128, 64, 2, 8)],
)
def test_configs_agree(config: QuantizingConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 330, 2, 64, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(3))
    columns = value_columns(anchor_local_layout(AnchorLocalPattern(37, 5, 1), 330, q.device), q.device)
    expected, found = quantized(q, k, v, columns), quantized(q, k, v, columns, config)
    for name in ("q", "q_scale", "v_scale"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert torch.equal(found.v.view(torch.uint8), expected.v.view(torch.uint8))
    torch.testing.assert_close(found.k_scale, expected.k_scale)
    assert (found.k.int() - expected.k.int()).abs().max() <= 1
    again = quantized(q, k, v, columns, config)
    assert torch.equal(found.k, again.k)
    assert torch.equal(found.k_scale, again.k_scale)


def assert_columns_are_those_of(layout: AnchorLocalLayout) -> ValueColumns:
    columns = value_columns(layout, torch.device("cpu"))
    assert columns.width % ALIGNMENT == 0
    held = columns.sources.tolist()
    assert held[: layout.tokens] == list(range(layout.tokens))
    assert len(columns.begins) == len(layout.runs)
    for begin, (key_begin, key_end) in zip(columns.begins.tolist(), layout.runs[:, 2:].tolist(), strict=True):
        assert begin % ALIGNMENT == 0
        assert held[begin : begin + key_end - key_begin] == list(range(key_begin, key_end))
    return columns


@pytest.mark.parametrize(
    ("tokens", "block_size", "stride"), [(1, 1, 1), (100, 24, 7), (257, 64, 16), (50, 1, 13)]
)
def test_segments_begin_aligned_and_other_columns_hold_zeros(
    tokens: int, block_size: int, stride: int
) -> None:
    layout = anchor_local_layout(AnchorLocalPattern(block_size, stride), tokens, torch.device("cpu"))
    columns = assert_columns_are_those_of(layout)
    odd = [end - begin for begin, end in layout.runs[:, 2:].tolist() if begin % ALIGNMENT]
    assert int((columns.sources >= 0).sum()) == tokens + sum(odd)


def test_aligned_segments_are_stored_once() -> None:
    layout = anchor_local_layout(AnchorLocalPattern(4096, 16), 32768, torch.device("cpu"))
    assert assert_columns_are_those_of(layout).width == 32768


def test_overlapping_windows_share_columns() -> None:
    layout = frames_layout((2, 2), 1, (9, 3, 8), torch.device("cpu"), 0)  # 24 tokens a frame
    columns = assert_columns_are_those_of(layout)
    assert columns.width <= 3 * layout.tokens
