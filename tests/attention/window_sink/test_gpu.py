"""What only a GPU can show. Run with ``pytest -m gpu tests/attention/window_sink``."""

import pytest
import torch

from attention import window_sink_attention
from attention.window_sink.sinks import SinkMode

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["null_logit", "key0_bias"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (48, 48, 96)])
def test_more_than_2_to_the_31_elements(heads: int, kv_heads: int, head_dim: int, mode: SinkMode) -> None:
    tokens, last_begin = 530_001, 529_000
    assert last_begin * heads * head_dim > 2**31
    q = torch.randn(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(tokens, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    sinks = 2 + torch.randn(heads, device="cuda")
    bounds = torch.tensor([0, 300_000, last_begin, tokens], device="cuda", dtype=torch.int32)
    settings = {"window": (64, 64), "sinks": sinks, "sink_mode": mode}
    out = window_sink_attention(q, k, v, bounds, impl="triton", **settings)  # type: ignore[arg-type]
    assert bool(out.isfinite().all())
    tail = slice(last_begin, tokens)
    truth = window_sink_attention(
        q[tail].double(),
        k[tail].double(),
        v[tail].double(),
        torch.tensor([0, tokens - last_begin], device="cuda"),
        impl="reference",
        **settings,  # type: ignore[arg-type]
    )
    error = (out[tail].double() - truth).norm() / truth.norm()
    assert error < 2**-7  # one rounding of weights and of outputs in bfloat16


@pytest.mark.parametrize("mode", [None, "null_logit", "key0_bias"])
def test_a_call_never_waits_and_can_be_captured(mode: SinkMode | None) -> None:
    q = torch.randn(4096, 8, 64, device="cuda", dtype=torch.bfloat16)
    bounds = torch.tensor([0, 1000, 4096], device="cuda")
    sinks = None if mode is None else torch.randn(8, device="cuda")

    def call() -> torch.Tensor:
        return window_sink_attention(q, q, q, bounds, window=(64, 64), sinks=sinks, sink_mode=mode)

    expected = call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


def test_a_new_length_compiles_nothing() -> None:
    from attention.window_sink.triton_impl import _window_sink_kernel

    def compiled() -> int:
        return sum(len(cache[0]) for cache in _window_sink_kernel.device_caches.values())

    def call(tokens: int, heads: int) -> None:
        q = torch.randn(tokens, heads, 64, device="cuda", dtype=torch.bfloat16)
        bounds = torch.tensor([0, tokens // 3, tokens], device="cuda", dtype=torch.int32)
        window_sink_attention(q, q, q, bounds, window=(64, 64))

    call(1000, 8)
    before = compiled()
    for tokens, heads in ((16, 8), (1001, 8), (4096, 3), (70_000, 1)):
        call(tokens, heads)
    assert compiled() == before
