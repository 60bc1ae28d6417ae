"""PyTorch and Triton implementations against the definition in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import anchor_local_attention
from attention.choice import Impl
from tests.attention.anchor_local.helpers import CASES, DEVICE, Case, budget, exact, inputs, relative_error

FAST: tuple[Impl, ...] = ("torch", "triton")


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_definition(case: Case, dtype: torch.dtype, impl: Impl) -> None:
    q, k, v = inputs(case, dtype, DEVICE)
    truth = exact(case, q, k, v)
    out = anchor_local_attention(
        q,
        k,
        v,
        block_size=case.block_size,
        anchor_stride=case.anchor_stride,
        anchor_offset=case.anchor_offset,
        impl=impl,
    )
    assert out.dtype == dtype
    assert out.shape == q.shape
    assert relative_error(out, truth) <= budget(case, q, k, v, truth, impl)


@settings(max_examples=60)
@given(st.integers(1, 150), st.integers(1, 40), st.integers(1, 160), st.data())
def test_torch_in_float64_is_the_definition(n: int, stride: int, block: int, data: st.DataObject) -> None:
    case = Case(n, block, stride, data.draw(st.integers(0, stride - 1)), head_dim=8)
    q_start = data.draw(st.integers(0, n - 1))
    queries = data.draw(st.integers(1, n - q_start))
    q, k, v = inputs(case, torch.float64)
    q = q[:, q_start : q_start + queries]
    out = anchor_local_attention(
        q,
        k,
        v,
        block_size=block,
        anchor_stride=stride,
        anchor_offset=case.anchor_offset,
        q_start=q_start,
        impl="torch",
    )
    torch.testing.assert_close(out, exact(case, q, k, v, q_start), rtol=1e-12, atol=1e-12)


@settings(max_examples=25)
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 210), st.data())
def test_triton_in_float32_is_the_definition(n: int, stride: int, block: int, data: st.DataObject) -> None:
    case = Case(n, block, stride, data.draw(st.integers(0, stride - 1)), heads=1, kv_heads=1)
    q, k, v = inputs(case, torch.float32, DEVICE)
    truth = exact(case, q, k, v)
    out = anchor_local_attention(
        q, k, v, block_size=block, anchor_stride=stride, anchor_offset=case.anchor_offset, impl="triton"
    )
    assert relative_error(out, truth) <= budget(case, q, k, v, truth)


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize(("q_start", "queries"), [(0, 90), (37, 100), (200, 57), (64, 1)])
def test_chunk_of_queries_is_those_rows_of_the_whole(q_start: int, queries: int, impl: Impl) -> None:
    case = Case(257, 60, 16, anchor_offset=5, batch=2)
    q, k, v = inputs(case, torch.float32, DEVICE)
    truth = exact(case, q, k, v)[:, q_start : q_start + queries]
    chunk = q[:, q_start : q_start + queries]
    out = anchor_local_attention(
        chunk, k, v, block_size=60, anchor_stride=16, anchor_offset=5, q_start=q_start, impl=impl
    )
    assert relative_error(out, truth) <= budget(case, q, k, v, exact(case, q, k, v), impl)


@pytest.mark.parametrize("impl", FAST)
def test_strided_inputs(impl: Impl) -> None:
    """Views of a fused projection, transposed heads, and a last dimension that is not dense."""
    case = Case(100, 24, 7, batch=2)
    q, k, v = inputs(case, torch.float32, DEVICE)
    truth = exact(case, q, k, v)
    fused = torch.stack([q, k, v], dim=2)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    sparse_last = [torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v)]
    for views in (fused.unbind(2), transposed, sparse_last):
        assert not any(x.is_contiguous() for x in views)
        out = anchor_local_attention(*views, block_size=24, anchor_stride=7, impl=impl)
        assert relative_error(out, truth) <= budget(case, q, k, v, truth, impl)


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_scale(impl: Impl) -> None:
    case = Case(100, 24, 7)
    q, k, v = inputs(case, torch.float32, DEVICE)
    half = anchor_local_attention(
        q, k, v, block_size=24, anchor_stride=7, scale=case.head_dim**-0.5 / 2, impl=impl
    )
    truth = exact(case, q / 2, k, v)
    assert relative_error(half, truth) <= budget(case, q / 2, k, v, truth, impl)


@pytest.mark.parametrize("impl", FAST)
def test_large_scores_do_not_overflow(impl: Impl) -> None:
    case = Case(100, 24, 7)
    q, k, v = (x * 100 for x in inputs(case, torch.float32, DEVICE))
    out = anchor_local_attention(q, k, v, block_size=24, anchor_stride=7, impl=impl)
    truth = exact(case, q, k, v)
    assert relative_error(out, truth) <= budget(case, q, k, v, truth, impl)
