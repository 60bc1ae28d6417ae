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
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "causal"),
    [(2, 2, 128, False), (4, 2, 64, False), (2, 1, 96, True), (1, 1, 256, False)],
)
def test_frames_and_globals_at_the_size_of_a_clip(
    heads: int, kv_heads: int, head_dim: int, causal: bool, mode: SinkMode | None
) -> None:
    """21 latent frames of 30 x 52 tokens, in both directions, with wide tiles; two clips."""
    frame, tokens = 1560, 21 * 1560
    q = torch.randn(2 * tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2 * tokens, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    bounds = torch.tensor([0, tokens, 2 * tokens], device="cuda")
    sinks = None if mode is None else 2 + torch.randn(heads, device="cuda")
    for globals_ in ({"global_keys": frame}, {"global_keys": frame, "global_queries": 700}, {}):
        settings = {"window": (2, 1), "unit": frame, "causal": causal, "sinks": sinks, "sink_mode": mode}
        settings |= globals_
        out = window_sink_attention(q, k, v, bounds, **settings)  # type: ignore[arg-type]
        settings["impl"] = "torch"
        truth = window_sink_attention(q.double(), k.double(), v.double(), bounds, **settings)  # type: ignore[arg-type]
        error = (out.double() - truth).norm() / truth.norm()
        assert error < 2**-7  # one rounding of weights and of outputs in bfloat16


def test_frames_with_more_than_2_to_the_31_elements() -> None:
    frame, frames, heads, head_dim = 3600, 150, 32, 128
    tokens = frame * frames
    last = slice(tokens - frame, tokens)
    assert last.start * heads * head_dim > 2**31
    q = torch.randn(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(tokens, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    bounds = torch.tensor([0, tokens], device="cuda")
    out = window_sink_attention(q, k, v, bounds, window=(1, 1), unit=frame, global_keys=frame)
    assert bool(out.isfinite().all())
    seen = torch.cat([torch.arange(frame), torch.arange(tokens - 2 * frame, tokens)]).cuda()
    one = slice(0, 1)
    rows, keys, values = (
        x.double().transpose(0, 1) for x in (q[last][:, one], k[seen][:, one], v[seen][:, one])
    )
    truth = ((rows @ keys.mT * head_dim**-0.5).softmax(-1) @ values).transpose(0, 1)
    error = (out[last][:, one].double() - truth).norm() / truth.norm()
    assert error < 2**-7


@pytest.mark.parametrize("mode", [None, "null_logit", "key0_bias"])
def test_a_call_never_waits_and_can_be_captured(mode: SinkMode | None) -> None:
    q = torch.randn(4096, 8, 64, device="cuda", dtype=torch.bfloat16)
    bounds = torch.tensor([0, 1000, 4096], device="cuda")
    sinks = None if mode is None else torch.randn(8, device="cuda")

    def call() -> torch.Tensor:
        plain = window_sink_attention(q, q, q, bounds, window=(64, 64), sinks=sinks, sink_mode=mode)
        return plain + window_sink_attention(
            q, q, q, bounds, window=(1, 1), unit=500, global_keys=500, sinks=sinks, sink_mode=mode
        )

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
        for unit, global_keys in ((400, 400), (401, 16), (800, 1), (1600, 0)):
            window_sink_attention(q, q, q, bounds, window=(1, 1), unit=unit, global_keys=global_keys)

    call(4800, 8)
    before = compiled()
    for tokens, heads in ((4801, 8), (5000, 3), (70_000, 1)):
        call(tokens, heads)
    assert compiled() == before
