"""PyTorch and Triton implementations against the definition in float64, for the boxes that they keep."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention import block_topk_attention, block_topk_ordered
from attention.block_topk.selection import kept_pairs
from attention.block_topk.triton_impl import block_topk_triton
from attention.choice import Impl
from tests.attention.block_topk.helpers import (
    CASES,
    DEVICE,
    Case,
    budget,
    exact,
    inputs,
    relative_error,
    selection,
)

FAST: tuple[Impl, ...] = ("torch", "triton")
# The interpreter needs half a second for a few boxes: all cases in float32, and a few in what GPUs use.
RUNS = [
    *(("torch", case, dtype) for case in CASES for dtype in (torch.float32, torch.bfloat16, torch.float16)),
    *(("triton", case, torch.float32) for case in CASES if case.head_dim != 128),
    *(("triton", case, torch.bfloat16) for case in (CASES[1], CASES[3])),
    ("triton", CASES[8], torch.float16),
]


def run(case: Case, q: Tensor, k: Tensor, v: Tensor, impl: Impl, top_k: float | None = None) -> Tensor:
    return block_topk_attention(
        q,
        k,
        v,
        grid=case.grid,
        top_k=case.top_k if top_k is None else top_k,
        tile_thw=case.tile_thw,
        block_size=case.block_size,
        anchor_stride=case.anchor_stride,
        anchor_offset=case.anchor_offset,
        pooled_rest=case.pooled_rest,
        text=case.text,
        impl=impl,
    )


@pytest.mark.parametrize(("impl", "case", "dtype"), RUNS, ids=str)
def test_equals_the_definition(impl: Impl, case: Case, dtype: torch.dtype) -> None:
    q, k, v = inputs(case, dtype)
    _, selected = selection(case, q, k, impl)
    truth = exact(case, q, k, v, selected)
    allowed = budget(case, q, k, v, selected, truth, impl)
    layout = case.layout()
    q, k, v = (x.index_select(1, layout.order) for x in (q, k, v))
    tally = torch.zeros((), dtype=torch.int64, device=q.device)
    if impl == "triton":
        out = torch.full_like(q, float("nan"))
        block_topk_triton(
            q,
            k,
            v,
            layout,
            top_k=case.top_k,
            pooled_rest=case.pooled_rest,
            scale=case.scale,
            tally=tally,
            out=out,
        )
    else:
        out = block_topk_ordered(
            q, k, v, layout, top_k=case.top_k, pooled_rest=case.pooled_rest, impl=impl, tally=tally
        )
    out = out.index_select(1, layout.inverse)
    assert (out.dtype, out.shape) == (dtype, q.shape)
    assert relative_error(out, truth) <= allowed
    assert int(tally) == int(kept_pairs(selected, layout))


@settings(max_examples=40)
@given(st.tuples(*[st.integers(1, 4)] * 3), st.tuples(*[st.integers(1, 3)] * 3), st.data())
def test_torch_in_float64_is_the_definition(
    grid: tuple[int, int, int], tile: tuple[int, int, int], data: st.DataObject
) -> None:
    stride = data.draw(st.none() | st.integers(1, 9))
    case = Case(
        grid,
        data.draw(st.floats(0.01, 0.99) | st.integers(1, 9)),
        tile_thw=tile,
        anchor_stride=stride,
        anchor_offset=data.draw(st.integers(0, stride - 1)) if stride else 0,
        pooled_rest=data.draw(st.booleans()),
        text=data.draw(st.integers(0, 3)),
        kv_heads=data.draw(st.integers(1, 2)),
        head_dim=8,
    )
    if data.draw(st.booleans()):
        case = replace(case, tile_thw=None, block_size=data.draw(st.integers(1, 9)))
    q, k, v = inputs(case, torch.float64, "cpu")
    # Scores of random tensors lie further apart than float64 rounds, so both keep the same boxes.
    torch.testing.assert_close(
        run(case, q, k, v, "torch"), run(case, q, k, v, "reference"), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    ("impl", "top_k"),
    [("reference", 0.999), ("torch", 0.999), ("torch", 8), ("torch", 1000), ("triton", 0.999)],
)
def test_keeping_all_boxes_is_dense(impl: Impl, top_k: float) -> None:
    case = replace(CASES[0], pooled_rest=True, heads=1, kv_heads=1)  # 8 boxes
    q, k, v = inputs(case, torch.float32)
    out = run(case, q, k, v, impl, top_k)
    rows, keys, values = (x.double().transpose(1, 2) for x in (q, k, v))
    dense = scaled_dot_product_attention(rows, keys, values).transpose(1, 2)
    selected = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=q.device)
    torch.testing.assert_close(exact(case, q, k, v, selected), dense, rtol=1e-12, atol=1e-12)
    assert relative_error(out, dense) <= budget(case, q, k, v, selected, dense, impl)


def test_a_box_that_is_not_kept_weighs_as_its_length_at_its_mean() -> None:
    """By hand: two boxes of 3 and 2 tokens that do not touch, seen by queries of the first."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 7, 1, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    out = block_topk_attention(
        q, k, v, grid=(1, 1, 7), block_size=3, top_k=1, pooled_rest=True, scale=1.0, impl="torch"
    )
    # Boxes are tokens 0 to 2, 3 to 5, and 6 alone; the first touches the second only.
    scores = q[0, 0, 0] @ k[0, :, 0].T
    weights = scores[:6].exp()
    last = scores[6].exp()  # of length 1: as if it were kept
    expected = (weights @ v[0, :6, 0] + last * v[0, 6, 0]) / (weights.sum() + last)
    torch.testing.assert_close(out[0, 0, 0], expected)
    # The last box's query sees boxes 1 and 2, and box 0 as one key three times.
    scores = q[0, 6, 0] @ k[0, 3:, 0].T
    mean = 3 * (q[0, 6, 0] @ k[0, :3, 0].mean(0)).exp()
    expected = (scores.exp() @ v[0, 3:, 0] + mean * v[0, :3, 0].mean(0)) / (scores.exp().sum() + mean)
    torch.testing.assert_close(out[0, 6, 0], expected)


@pytest.mark.parametrize(("impl", "device"), [("torch", "cpu"), ("triton", DEVICE)])
def test_a_mean_key_has_its_weight_in_low_precision(impl: Impl, device: str) -> None:
    """Equal scores: the last of three boxes of 509 is a third; bfloat16 has no number near log 509.

    Weights and output are rounded.
    """
    q = torch.zeros(1, 1527, 1, 16, dtype=torch.bfloat16, device=device)
    v = torch.zeros_like(q)
    v[:, 1018:] = 1
    out = block_topk_attention(
        q, q, v, grid=(1, 1, 1527), block_size=509, top_k=1, pooled_rest=True, impl=impl
    )
    third = torch.full_like(v[:, :509], 1 / 3)
    torch.testing.assert_close(out[:, :509], third, rtol=torch.finfo(q.dtype).eps, atol=0)


@pytest.mark.parametrize("impl", FAST)
def test_strided_inputs(impl: Impl) -> None:
    """Views of a fused projection, transposed heads, and a last dimension that is not dense."""
    case = Case((2, 3, 4), 1, block_size=8, batch=2, heads=1, kv_heads=1)
    layout = case.layout()
    q, k, v = inputs(case, torch.float32)
    _, selected = selection(case, q, k, impl)
    truth = exact(case, q, k, v, selected)
    fused = torch.stack([q, k, v], dim=2).unbind(2)
    transposed = [
        torch.cat([x, x], dim=2).transpose(1, 2).contiguous().transpose(1, 2)[:, :, :1] for x in (q, k, v)
    ]
    sparse_last = [torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v)]
    for views in (fused, transposed, sparse_last):
        strided_q, strided_k, strided_v = views
        assert not any(x.is_contiguous() for x in views)
        assert torch.equal(layout.order, torch.arange(24, device=q.device))  # runs: nothing is moved
        out = block_topk_ordered(strided_q, strided_k, strided_v, layout, top_k=1, impl=impl)
        assert relative_error(out, truth) <= budget(case, q, k, v, selected, truth, impl)


@pytest.mark.parametrize("impl", FAST)
def test_large_scores_do_not_overflow(impl: Impl) -> None:
    case = Case((1, 6, 8), 1, block_size=12, heads=1, kv_heads=1, pooled_rest=True)
    q, k, v = (x * 100 for x in inputs(case, torch.float32))
    _, selected = selection(case, q, k, impl)
    truth = exact(case, q, k, v, selected)
    assert relative_error(run(case, q, k, v, impl), truth) <= budget(case, q, k, v, selected, truth, impl)


def test_a_compiled_call_has_no_graph_break() -> None:
    case = CASES[2]
    q, k, v = inputs(case, torch.float32)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(case, q, k, v, "torch"), run(case, q, k, v, "torch"))
