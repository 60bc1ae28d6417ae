"""What only a GPU can show. Run with ``pytest -m gpu tests/attention/selected``."""

import pytest
import torch

from attention.selected.api import sparse_attn
from tests.attention.selected.helpers import Case, budget, exact, inputs, relative_error, run

pytestmark = pytest.mark.gpu

FULL = (
    Case(heads=64, width=512, rows=3000, listed=640, queries=33),
    Case(heads=128, width=576, rows=5000, listed=2176, queries=9),
    Case(heads=128, width=512, rows=5000, listed=2176, queries=5, batch=2),
    Case(heads=8, width=512, rows=700, listed=2176, queries=9),
    Case(heads=16, width=576, rows=700, listed=1, queries=9),
    Case(heads=64, width=192, rows=4000, listed=1000, queries=40),
    Case(heads=24, width=320, rows=900, listed=130, queries=40),
    Case(heads=64, width=448, rows=900, listed=129, queries=40),
    Case(heads=32, width=64, rows=900, listed=640, queries=200, batch=3),
    Case(heads=128, width=128, rows=900, listed=513, queries=100),
    Case(heads=100, width=500, rows=900, listed=200, queries=20),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", FULL, ids=str)
def test_full_sizes(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype, "cuda")
    truth = exact(x)
    out = run(x, "triton")
    assert bool(out.isfinite().all())
    assert relative_error(out, truth) <= budget(x, truth)


def test_more_than_2_to_the_31_elements() -> None:
    """Of queries and of rows, both read at their ends."""
    rows, queries, heads, width = 4_300_000, 66_000, 64, 512
    assert min(rows * width, queries * heads * width) > 2**31
    q = torch.randn(1, queries, heads, width, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(1, rows, width, device="cuda", dtype=torch.bfloat16)
    sink = torch.randn(heads, device="cuda")
    lists = rows - 1 - torch.randint(0, 1000, (1, queries, 64), device="cuda", dtype=torch.int32)
    out = sparse_attn(q, kv, sink, lists)
    tail = slice(queries - 5, queries)
    truth = sparse_attn(
        q[:, tail].double(),
        kv[:, -1000:].double(),
        sink,
        lists[:, tail] - (rows - 1000),
        impl="reference",
    )
    assert relative_error(out[:, tail], truth) < 2**-7  # one rounding of weights and of outputs in bfloat16


def test_a_call_never_waits_and_can_be_captured() -> None:
    x = inputs(FULL[0], torch.bfloat16, "cuda")
    expected = run(x, "triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(x, "triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, "triton")
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


def test_new_lengths_compile_nothing() -> None:
    from attention.selected.triton_impl import _sparse_attn_kernel

    def compiled() -> int:
        return sum(len(cache[0]) for cache in _sparse_attn_kernel.device_caches.values())

    def call(queries: int, rows: int, listed: int, batch: int = 1) -> None:
        case = Case(heads=64, width=512, rows=rows, listed=listed, queries=queries, batch=batch)
        run(inputs(case, torch.bfloat16, "cuda"), "triton")

    call(16, 640, 128)
    before = compiled()
    call(17, 641, 1)
    call(1, 50, 129, batch=2)
    call(128, 4096, 640)
    assert compiled() == before


def test_compiled_by_inductor() -> None:
    x = inputs(FULL[0], torch.bfloat16, "cuda")

    def attend(q: torch.Tensor) -> torch.Tensor:
        return sparse_attn(q * 2, x.kv, x.sink, x.topk_idxs) + 1

    out = torch.compile(attend, fullgraph=True)(x.q)
    torch.testing.assert_close(out, attend(x.q))
