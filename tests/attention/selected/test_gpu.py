"""What only a GPU can show. Run with ``pytest -m gpu tests/attention/selected``."""

import pytest
import torch

from attention.selected.api import sparse_attn
from attention.selected.config import CompressedAttentionConfig
from attention.selected.indexer import IndexConfig
from attention.selected.module import CompressedAttention
from tests.attention.selected import test_module
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


@pytest.mark.parametrize("config", test_module.SMALL.values(), ids=test_module.SMALL)
def test_portions_much_longer_than_the_ring(config: CompressedAttentionConfig) -> None:
    """Where two rows of a call have one slot, the later one must stay; a GPU writes them in any order."""
    module = test_module.layer(config).cuda()
    x = test_module.tokens(config, 2, 1501).cuda()
    state = module.new_state(2, 1501)
    out = torch.cat([module(part, state) for part in x.split((1000, 1, 1, 499), dim=1)], dim=1)
    torch.testing.assert_close(out, test_module.whole(module, x))


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_the_published_width_in_bfloat16(ratio: int) -> None:
    """Triton against PyTorch on the same layer: a prompt, and tokens one by one."""
    config = CompressedAttentionConfig(
        dim=512,
        q_rank=128,
        out_rank=64,
        ratio=ratio,
        overlap=ratio == 4,
        index=IndexConfig(topk=10_000) if ratio == 4 else None,  # all: rounding may not choose others
        simulate_quantization=True,
    )
    torch.manual_seed(0)
    module = CompressedAttention(config, dtype=torch.bfloat16).cuda()
    x = torch.randn(2, 1030, config.dim, device="cuda", dtype=torch.bfloat16)
    results = []
    for impl in ("triton", "torch"):
        module.impl = impl
        state = module.new_state(2, 1030)
        results.append(torch.cat([module(part, state) for part in x.split((1020, *[1] * 10), dim=1)], dim=1))
    assert bool(results[0].isfinite().all())
    assert (
        relative_error(results[0], results[1].double()) < 2**-6
    )  # roundings of weights, output, projections
