"""PyTorch and Triton implementations of sparse_attn against the definition in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.choice import Impl
from attention.selected.api import sparse_attn
from attention.selected.triton_impl import TileConfig, parts, sparse_attn_triton, tile_config
from tests.attention.selected.helpers import (
    DEVICE,
    EMPTY_ROW,
    Case,
    Inputs,
    budget,
    exact,
    inputs,
    relative_error,
    run,
)

FAST: tuple[Impl, ...] = ("torch", "triton")
DTYPES = (torch.float32, torch.bfloat16)
# Steps have 16 to 64 entries and tiles 16 to 64 heads: numbers below, at and above them; widths that are a
# power of two, one and a half, and anything; lists longer than there are rows.
CASES = (
    Case(heads=8, width=64, rows=5, listed=1),
    Case(heads=16, width=72, rows=40, listed=64, batch=2),
    Case(heads=20, width=100, rows=200, listed=65),
    Case(heads=64, width=128, rows=33, listed=63),
    Case(heads=128, width=192, rows=70, listed=37, queries=1),
    Case(heads=8, width=512, rows=128, listed=100),
    Case(heads=40, width=576, rows=50, listed=33),
    Case(heads=1, width=8, rows=3, listed=9, queries=17),
    Case(heads=3, width=1, rows=9, listed=4),
)
LONG = Case(heads=8, width=64, rows=2500, listed=2176, queries=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES, LONG], ids=str)
@pytest.mark.parametrize("impl", FAST)
def test_equals_the_definition(impl: Impl, case: Case, dtype: torch.dtype) -> None:
    x = inputs(case, dtype, DEVICE)
    truth = exact(x)
    out = run(x, impl)
    assert out.dtype == dtype
    assert out.shape == x.q.shape
    assert bool(out.isfinite().all())
    assert relative_error(out, truth) <= budget(x, truth)


cases = st.builds(
    Case,
    heads=st.sampled_from((1, 5, 16)),
    width=st.integers(1, 80),
    rows=st.integers(1, 60),
    listed=st.integers(1, 90),
    queries=st.integers(1, 5),
    batch=st.integers(1, 3),
)


@settings(max_examples=40)
@given(cases)
def test_torch_in_float64_is_the_definition(case: Case) -> None:
    x = inputs(case, torch.float64)
    torch.testing.assert_close(run(x, "torch"), exact(x), rtol=1e-12, atol=1e-12)


@settings(max_examples=12)
@given(cases)
def test_triton_in_float32_is_the_definition(case: Case) -> None:
    x = inputs(case, torch.float32, DEVICE)
    truth = exact(x)
    assert relative_error(run(x, "triton"), truth) <= budget(x, truth)


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_half_precision(impl: Impl) -> None:
    x = inputs(CASES[1], torch.float16, DEVICE)
    truth = exact(x)
    assert relative_error(run(x, impl), truth) <= budget(x, truth)


@pytest.mark.parametrize(
    "tiles", [TileConfig(16, 64, 4, 3), TileConfig(64, 16, 4, 3, split_keys=True), TileConfig(32, 32, 8, 3)]
)
def test_any_tiles_write_every_element(tiles: TileConfig) -> None:
    """Outputs start as NaN."""
    x = inputs(Case(heads=40, width=96, rows=90, listed=50, batch=2), torch.float32, DEVICE)
    truth = exact(x)
    out = torch.full_like(x.q, float("nan"))
    sparse_attn_triton(x.q, x.kv, x.sink, x.topk_idxs, 96**-0.5, tiles, out)
    assert relative_error(out, truth) <= budget(x, truth)


@pytest.mark.parametrize("sink", [float("-inf"), -3e38, -80.0, 0.0, 1e4, 3e38])
@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_a_query_that_lists_nothing_is_zero(impl: Impl, sink: float) -> None:
    x = inputs(CASES[1], torch.bfloat16, DEVICE)
    out = sparse_attn(x.q, x.kv, torch.full_like(x.sink, sink), x.topk_idxs, impl=impl)
    assert bool((out[:, EMPTY_ROW] == 0).all())
    assert bool(out.isfinite().all())
    nothing = torch.full_like(x.topk_idxs, -1)
    assert bool((sparse_attn(x.q, x.kv, x.sink, nothing, impl=impl) == 0).all())


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_one_row_and_a_sink_by_hand(impl: Impl) -> None:
    """Score 2, sink log 3: the row's weight is e^2 / (3 + e^2); listed three times it counts three times."""
    q = torch.tensor([[[[4.0]]]], device=DEVICE)
    kv = torch.tensor([[[7.0], [0.5]]], device=DEVICE)
    sink = torch.tensor([3.0], device=DEVICE).log()
    exp = torch.tensor(2.0, device=DEVICE).exp()
    for lists, times in (([1], 1), ([-1, 1, -1], 1), ([1, 1, -1, 1], 3)):
        listed = torch.tensor([[lists]], dtype=torch.int32, device=DEVICE)
        out = sparse_attn(q, kv, sink, listed, 1.0, impl=impl)
        torch.testing.assert_close(out.flatten()[0], 0.5 * times * exp / (3 + times * exp))


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_order_and_place_of_a_list_do_not_matter(impl: Impl) -> None:
    x = inputs(CASES[1], torch.float32, DEVICE)
    shuffled = x.topk_idxs[:, :, torch.randperm(x.topk_idxs.shape[2])]
    out = run(x, impl)
    torch.testing.assert_close(sparse_attn(x.q, x.kv, x.sink, shuffled, impl=impl), out)


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 0)], ids=["batch", "queries", "listed"])
def test_nothing_to_do(shape: tuple[int, int, int], impl: Impl) -> None:
    batch, queries, listed = shape
    q = torch.randn(batch, queries, 4, 16, device=DEVICE)
    kv = torch.randn(batch, 6, 16, device=DEVICE)
    lists = torch.zeros(batch, queries, listed, dtype=torch.int32, device=DEVICE)
    out = sparse_attn(q, kv, torch.zeros(4, device=DEVICE), lists, impl=impl)
    assert torch.equal(out, torch.zeros_like(q))


@pytest.mark.parametrize("impl", FAST)
def test_no_rows(impl: Impl) -> None:
    q = torch.randn(1, 2, 4, 16, device=DEVICE)
    lists = torch.full((1, 2, 3), -1, dtype=torch.int32, device=DEVICE)
    out = sparse_attn(q, q.new_empty(1, 0, 16), torch.zeros(4, device=DEVICE), lists, impl=impl)
    assert torch.equal(out, torch.zeros_like(q))


@pytest.mark.parametrize("impl", FAST)
def test_strides(impl: Impl) -> None:
    """Views of larger tensors, heads before queries, lists that all share, a last dimension in steps."""
    x = inputs(CASES[2], torch.float32, DEVICE)
    q = x.q.transpose(1, 2).contiguous().transpose(1, 2)
    kv = torch.cat([x.kv, x.kv], dim=2)[:, :, : x.kv.shape[2]]
    for strided in (
        Inputs(q, kv, x.sink, x.topk_idxs[:, :1].expand(x.topk_idxs.shape)),
        Inputs(
            x.q.repeat_interleave(2, 3)[..., ::2],
            x.kv.repeat_interleave(2, 2)[..., ::2],
            x.sink.repeat_interleave(2)[::2],
            x.topk_idxs.repeat_interleave(2, 2)[..., ::2],
        ),
    ):
        plain = Inputs(*(t.contiguous() for t in (strided.q, strided.kv, strided.sink, strided.topk_idxs)))
        truth = exact(plain)
        assert relative_error(run(strided, impl), truth) <= budget(plain, truth)


def test_torch_gathers_in_bounded_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(Case(heads=4, width=16, rows=30, listed=20, queries=23, batch=2), torch.float64)
    whole = run(x, "torch")
    monkeypatch.setattr("attention.selected.torch_impl._GATHERED_BYTES", 5 * 20 * 16 * 8)
    torch.testing.assert_close(run(x, "torch"), whole)


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        *((1, (16, 0)), (16, (16, 0)), (17, (16, 16)), (64, (64, 0)), (72, (64, 16))),
        *((192, (128, 64)), (500, (256, 256)), (512, (512, 0)), (576, (512, 64))),
    ],
)
def test_parts_of_a_width(width: int, columns: tuple[int, int]) -> None:
    assert parts(width) == columns


def test_tiles_have_no_more_heads_than_there_are() -> None:
    wide = {heads: tile_config(torch.bfloat16, 512, heads, hopper=True).block_h for heads in (8, 20, 64, 128)}
    assert wide == {8: 16, 20: 32, 64: 64, 128: 64}
