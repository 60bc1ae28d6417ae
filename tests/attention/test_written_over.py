"""Self-attention whose result is written over its queries says the same as where it is given."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attention
from attention.forward import swapped_attention, swapped_attention_
from tests.attention.tiny_transformer import LAYERS, run, tiny_transformer

SWAPS: dict[str, dict[str, Any]] = {
    "anchor_local": {"backend": "anchor_local", "block_size": 20, "anchor_stride": 7},
    "its kernel": {"backend": "anchor_local", "block_size": 20, "anchor_stride": 7, "impl": "triton"},
    "some dense": {"backend": "anchor_local", "block_size": 20, "anchor_stride": 7, "dense_layers": (1,)},
    "dense": {"backend": "dense"},
    "window": {"backend": "window", "window": 9},
    "block_topk": {"backend": "block_topk", "top_k": 2, "tile_thw": (3, 3, 3)},
}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", SWAPS)
def test_says_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny_transformer(), []

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        given: Tensor = swapped_attention(q, k, v, *rest)
        before = given.clone()
        swapped_attention_(q, k, v, *rest)
        assert torch.equal(q, given)
        assert torch.equal(given, before)  # no result of one call lies where another's is
        calls.append(name)
        return q

    monkeypatch.setattr("attention.swapping.swapped_attention", attend)
    with attention.swap(model, **SWAPS[name]) as handle:
        run(model)
    assert len(calls) == LAYERS
    report = handle.report()
    assert report.sparse_calls + report.dense_calls == 2 * LAYERS


@pytest.mark.parametrize("name", SWAPS)
def test_some_heads_at_a_time_say_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_transformer()
    with attention.swap(model, **SWAPS[name]) as handle:
        expected = run(model)
    report = handle.report()

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        q, before = q.clone(), q.clone()
        swapped_attention_(q, k, v[:, :, :1], *rest)
        assert torch.equal(q[:, :, 1:], before[:, :, 1:])
        swapped_attention_(q, k, v[:, :, 1:].contiguous(), *rest, 1)
        return q

    monkeypatch.setattr("attention.swapping.swapped_attention", attend)
    with attention.swap(model, **SWAPS[name]) as handle:
        found = run(model)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert handle.report() == report


def test_heads_with_sinks_are_never_apart() -> None:
    window: dict[str, Any] = {"backend": "window", "window": 9}
    for sinks in (None, torch.zeros(2)):
        model = tiny_transformer()
        with attention.swap(model, **window, sinks=sinks, sink_mode=None if sinks is None else "null_logit"):
            assert {block.attn1.processor.takes_some_heads for block in model.blocks} == {sinks is None}


def test_a_call_may_name_where_its_result_goes() -> None:
    layout = attention.anchor_local_layout(attention.AnchorLocalPattern(20, 7), 105, torch.device("cpu"))
    q, k, v = torch.randn(3, 2, 105, 2, 32).unbind()
    expected = attention.anchor_local_ordered(q, k, v, layout)
    assert attention.anchor_local_ordered(q, k, v, layout, out=q) is q
    assert torch.equal(q, expected)
    with pytest.raises(ValueError, match=r"out must be torch.float32 of shape \(2, 105, 2, 32\)"):
        attention.anchor_local_ordered(q, k, v, layout, out=q[:, :100])
