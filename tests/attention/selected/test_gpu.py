"""What only a GPU can show. Run with ``pytest -m gpu tests/attention/selected``."""

from dataclasses import replace

import pytest
import torch

from attention.choice import Impl, is_hopper
from attention.selected.api import implementation, sparse_attn
from attention.selected.config import CompressedAttentionConfig
from attention.selected.indexer import IndexConfig
from attention.selected.module import CompressedAttention
from tests.attention.selected import test_module
from tests.attention.selected.helpers import (
    EMPTY_ROW,
    Case,
    Inputs,
    budget,
    exact,
    inputs,
    relative_error,
    run,
)

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

IMPLS: tuple[Impl, ...] = ("triton", "auto")  # the kernel for all GPUs, and Hopper's own on Hopper


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", FULL, ids=str)
def test_full_sizes(case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype, "cuda")
    truth = exact(x)
    out = run(x, "triton")
    assert bool(out.isfinite().all())
    assert relative_error(out, truth) <= budget(x, truth)


@pytest.mark.parametrize("impl", IMPLS)
def test_more_than_2_to_the_31_elements(impl: Impl) -> None:
    """Of queries and of rows, both read at their ends."""
    rows, queries, heads, width = 4_300_000, 66_000, 64, 512
    assert min(rows * width, queries * heads * width) > 2**31
    q = torch.randn(1, queries, heads, width, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(1, rows, width, device="cuda", dtype=torch.bfloat16)
    sink = torch.randn(heads, device="cuda")
    lists = rows - 1 - torch.randint(0, 1000, (1, queries, 64), device="cuda", dtype=torch.int32)
    out = sparse_attn(q, kv, sink, lists, impl=impl)
    tail = slice(queries - 5, queries)
    truth = sparse_attn(
        q[:, tail].double(),
        kv[:, -1000:].double(),
        sink,
        lists[:, tail] - (rows - 1000),
        impl="reference",
    )
    assert relative_error(out[:, tail], truth) < 2**-7  # one rounding of weights and of outputs in bfloat16


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("case", FULL[:2], ids=str)
def test_a_call_never_waits_and_can_be_captured(case: Case, impl: Impl) -> None:
    x = inputs(case, torch.bfloat16, "cuda")
    expected = run(x, impl)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(x, impl)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x, impl)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_new_lengths_compile_nothing(impl: Impl) -> None:
    from attention.selected import gluon_impl, triton_impl

    def compiled() -> int:
        kernels = (triton_impl._sparse_attn_kernel, gluon_impl._sparse_attn_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def call(queries: int, rows: int, listed: int, batch: int = 1) -> None:
        case = Case(heads=64, width=512, rows=rows, listed=listed, queries=queries, batch=batch)
        run(inputs(case, torch.bfloat16, "cuda"), impl)

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


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_the_published_width_in_bfloat16(ratio: int, impl: Impl) -> None:
    """A kernel against PyTorch on the same layer: a prompt, and tokens one by one."""
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
    for module.impl in (impl, "torch"):
        state = module.new_state(2, 1030)
        results.append(torch.cat([module(part, state) for part in x.split((1020, *[1] * 10), dim=1)], dim=1))
    assert bool(results[0].isfinite().all())
    assert (
        relative_error(results[0], results[1].double()) < 2**-6
    )  # roundings of weights, output, projections


hopper_only = pytest.mark.skipif(
    torch.cuda.is_available() and not is_hopper(torch.device("cuda", 0)), reason="Hopper's own kernel"
)
WIDTHS = (512, 576)


def run_on_hopper(x: Inputs) -> torch.Tensor:
    """Hopper's kernel, whose output begins as NaN; that ``auto`` takes it, and that it repeats bit by bit."""
    from attention.selected.gluon_impl import sparse_attn_gluon

    assert implementation("auto", x.q, x.kv) == "gluon"
    out = torch.full(x.q.shape, float("nan"), dtype=x.q.dtype, device="cuda")
    sparse_attn_gluon(x.q, x.kv, x.sink, x.topk_idxs, x.q.shape[3] ** -0.5, out=out)
    assert bool(out.isfinite().all())
    for _ in range(3):
        assert torch.equal(run(x, "auto"), out)
    return out


@hopper_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("heads", "listed"),
    # Tiles have 64 heads and 32 or 64 rows, of which two at a time: below, at and above them.
    [
        *((8, 1), (16, 31), (24, 32), (32, 33), (40, 63), (64, 64), (64, 65), (64, 127), (65, 128)),
        *((72, 129), (100, 193), (128, 257), (64, 640), (8, 2176), (128, 2176)),
    ],
)
def test_the_kernel_of_hopper_is_the_definition(
    heads: int, listed: int, width: int, dtype: torch.dtype
) -> None:
    """-1 stands anywhere, a query lists nothing, one half of its list the same row; unlisted rows are NaN."""
    x = inputs(Case(heads, width, rows=700, listed=listed, queries=5, batch=2), dtype, "cuda")
    truth = exact(x)
    out = run_on_hopper(x)
    assert bool((out[:, EMPTY_ROW] == 0).all())
    assert relative_error(out, truth) <= budget(x, truth)


@hopper_only
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("heads", [64, 128])
def test_the_kernel_of_hopper_has_several_queries_a_program(heads: int, width: int) -> None:
    x = inputs(Case(heads, width, rows=900, listed=193, queries=501), torch.bfloat16, "cuda")
    truth = exact(x)
    assert relative_error(run_on_hopper(x), truth) <= budget(x, truth)


@hopper_only
@pytest.mark.parametrize("sink", [float("-inf"), -80.0, 0.0, 1e4])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_kernel_of_hopper_where_tiles_list_nothing(width: int, sink: float) -> None:
    """Single keys at the ends and between empty tiles, and indices that are no row: they list nothing."""
    x = inputs(Case(64, width, rows=300, listed=400, queries=8), torch.bfloat16, "cuda")
    lists = torch.full_like(x.topk_idxs, -1)
    listed = x.kv[0].isfinite().all(1).nonzero().flatten().int()
    for query, place in enumerate((0, 31, 32, 64, 127, 128, 399)):
        lists[0, query, place] = listed[query]
    x = replace(x, topk_idxs=lists, sink=torch.full_like(x.sink, sink))
    out, truth = run_on_hopper(x), exact(x)
    assert bool((out[0, 7] == 0).all())
    assert relative_error(out, truth) <= budget(x, truth)
    wrong = lists.clone()
    wrong[wrong == -1] = 300
    wrong[0, ::2, 200:210] = -(2**31)
    wrong[0, 1::2, 200:210] = 2**31 - 1
    assert torch.equal(run(replace(x, topk_idxs=wrong), "auto"), out)


@hopper_only
@pytest.mark.parametrize("width", WIDTHS)
def test_the_kernel_of_hopper_takes_strides(width: int) -> None:
    """Heads before queries, rows of wider ones, lists in steps; rows off 16 bytes go to the other kernel."""
    x = inputs(Case(24, width, rows=300, listed=130, queries=9, batch=2), torch.bfloat16, "cuda")
    truth = exact(x)
    q = x.q.transpose(1, 2).contiguous().transpose(1, 2)
    kv = torch.cat([x.kv, x.kv], dim=2)[:, :, :width]
    lists = x.topk_idxs.repeat_interleave(2, 2)[..., ::2]
    out = run_on_hopper(x)
    assert torch.equal(run_on_hopper(Inputs(q, kv, x.sink.repeat_interleave(2)[::2], lists)), out)
    shifted = torch.cat([x.kv[..., :1], x.kv], dim=2)[:, :, 1:]
    assert implementation("auto", x.q, shifted) == "triton"
    assert relative_error(run(replace(x, kv=shifted), "auto"), truth) <= budget(x, truth)


@hopper_only
def test_the_kernel_of_hopper_has_nothing_to_do() -> None:
    for batch, queries, rows, listed in ((0, 3, 6, 5), (2, 0, 6, 5), (2, 3, 6, 0), (2, 3, 0, 5)):
        q = torch.randn(batch, queries, 4, 512, device="cuda", dtype=torch.bfloat16)
        kv = torch.randn(batch, rows, 512, device="cuda", dtype=torch.bfloat16)
        lists = torch.full((batch, queries, listed), -1, dtype=torch.int32, device="cuda")
        out = sparse_attn(q, kv, torch.zeros(4, device="cuda"), lists)
        assert torch.equal(out, torch.zeros_like(q))
