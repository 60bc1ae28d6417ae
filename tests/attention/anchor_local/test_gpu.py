"""What only a GPU can show: full sizes. Run with ``pytest -m gpu tests/attention/anchor_local``."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attention import AnchorLocalPattern, anchor_local_layout
from attention.anchor_local.api import anchor_local_ordered, implementation, kernel
from attention.anchor_local.fp8_impl import anchor_local_fp8
from attention.anchor_local.reference import allowed
from attention.choice import Impl, Precision, is_hopper
from attention.dense import dense_attention, dense_implementation
from benchmarks.attention_accuracy import accuracy_rows
from benchmarks.attention_candidates import FP8_CONFIGS
from benchmarks.attention_cases import FP8_ERROR, Shape, inputs, truth
from benchmarks.kernels.anchor_local import CANDIDATES, run

pytestmark = pytest.mark.gpu


# Descriptors, pointers, and Hopper's own kernel.
@pytest.mark.parametrize(
    ("heads", "head_dim", "impl"), [(32, 128, "triton"), (48, 96, "triton"), (32, 128, "auto")]
)
def test_more_than_2_to_the_31_elements(heads: int, head_dim: int, impl: Impl) -> None:
    tokens = 530_001
    assert tokens * heads * head_dim > 2**31
    pattern = AnchorLocalPattern(4096, 64, 3)
    q, k, v = (torch.randn(1, tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    layout = anchor_local_layout(pattern, tokens, q.device)
    run_kernel = kernel(implementation(impl, q, "full"), "full")
    out = run_kernel(q, k, v, layout, head_dim**-0.5, out=torch.full_like(q, float("nan")))
    assert bool(out.isfinite().all())
    rows = torch.tensor([0, layout.anchors - 1, layout.anchors, tokens // 2, tokens - 1], device="cuda")
    mask = allowed(pattern, layout.key_order[rows], layout.key_order)
    for head in (0, heads - 1):
        scores = q[0, rows, head].double() @ k[0, :, head].double().T * head_dim**-0.5
        truth = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v[0, :, head].double()
        error = (out[0, rows, head].double() - truth).norm() / truth.norm()
        assert error < 2**-7  # one rounding of weights and of outputs in bfloat16


def test_errors_at_full_size() -> None:
    """Of bfloat16 no larger than eager's; of fp8 below 4e-2."""
    wrong = [row for row in accuracy_rows() if not row.passes]
    assert wrong == []


# Segments that begin at no multiple of 16, tiles of both ranges with rests, a length that nothing divides.
SHAPES = {head_dim: Shape(9_001, 3, head_dim, 1_501, 7) for head_dim in (64, 128)}


@pytest.mark.parametrize(
    ("head_dim", "name"), [(head_dim, name) for head_dim, found in CANDIDATES.items() for name in found]
)
def test_candidates_are_the_definition(head_dim: int, name: str) -> None:
    shape = SHAPES[head_dim]
    x = inputs(shape)
    exact = truth(shape, x)
    out = torch.full_like(x.q, float("nan"))
    run(CANDIDATES[head_dim][name], x.q, x.k, x.v, x.layout, shape.scale, out)
    assert bool(out.isfinite().all())
    assert exact.error(out) <= exact.eager_error


@pytest.mark.parametrize("name", FP8_CONFIGS)
def test_fp8_tiles_are_the_definition(name: str) -> None:
    shape = SHAPES[128]
    x = inputs(shape)
    out = torch.full_like(x.q, float("nan"))
    anchor_local_fp8(x.q, x.k, x.v, x.layout, shape.scale, FP8_CONFIGS[name], out)
    assert bool(out.isfinite().all())
    assert truth(shape, x).error(out) < FP8_ERROR


hopper_only = pytest.mark.skipif(
    torch.cuda.is_available() and not is_hopper(torch.device("cuda", 0)), reason="Hopper's own kernel"
)


@hopper_only
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("tokens", "block_size", "stride"),
    # Nothing divides; fewer keys than a tile; one token; one segment; every token an anchor; no whole tile.
    [
        (9_001, 1_501, 7),
        (70, 10, 7),
        (1, 1, 1),
        (2_048, 2_048, 64),
        (300, 300, 1),
        (127, 63, 127),
        (513, 40, 4),
    ],
)
def test_hopper_kernel_is_the_definition(tokens: int, block_size: int, stride: int, head_dim: int) -> None:
    shape = Shape(tokens, 3, head_dim, block_size, stride)
    x = inputs(shape)
    assert implementation("auto", x.q, "full") == "gluon"
    out = torch.full_like(x.q, float("nan"))
    kernel("gluon", "full")(x.q, x.k, x.v, x.layout, shape.scale, out=out)
    assert bool(out.isfinite().all())
    exact = truth(shape, x)
    assert exact.error(out) <= exact.eager_error


@hopper_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_kernel_takes_batches_shared_heads_strides_and_chunks(dtype: torch.dtype) -> None:
    """Beside the kernel for all GPUs, on the same tensors."""
    layout = anchor_local_layout(AnchorLocalPattern(700, 9, 2), 3_001, torch.device("cuda"), 500, 1_777)
    rows = torch.randn(2, 3_001, 3, 4, 128, device="cuda", dtype=dtype)
    q = rows[:, :1_777, 0]
    k, v = (rows[:, :, part, :2] for part in (1, 2))
    out = anchor_local_ordered(q, k, v, layout)
    expected = anchor_local_ordered(q, k, v, layout, impl="triton")
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error < 2**-8  # both round weights and results once more than exact sums would
    odd = torch.randn(2, 3_001, 2, 129, device="cuda", dtype=dtype)[
        ..., 1:
    ]  # rows from no multiple of 16 bytes
    assert torch.equal(
        anchor_local_ordered(q, odd, v, layout), anchor_local_ordered(q, odd.contiguous(), v, layout)
    )


@pytest.mark.parametrize("precision", ["full", "fp8"])
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_results_may_be_written_over_the_queries(impl: Impl, precision: Precision) -> None:
    """Of all tiles at once, also where q is a third of the rows of a product."""
    pattern = AnchorLocalPattern(3_120, 16)
    rows = torch.randn(2, 32_760, 3, 4, 128, device="cuda", dtype=torch.bfloat16)
    layout = anchor_local_layout(pattern, 32_760, rows.device)
    q, k, v = rows.unbind(2)
    expected = anchor_local_ordered(q, k, v, layout, impl=impl, precision=precision)
    others = k.clone(), v.clone()
    anchor_local_ordered(q, k, v, layout, impl=impl, precision=precision, out=q)
    assert torch.equal(q, expected)
    assert all(map(torch.equal, (k, v), others))


@hopper_only
def test_dense_results_may_be_written_over_the_queries() -> None:
    q, k, v = torch.randn(3, 1, 40_001, 2, 128, device="cuda", dtype=torch.bfloat16).unbind()
    assert dense_implementation(q, k) == "gluon"
    expected = dense_attention(q, k, v, 128**-0.5)
    dense_attention(q, k, v, 128**-0.5, out=q)
    assert torch.equal(q, expected)


@hopper_only
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_kernel_can_be_captured_and_repeats(head_dim: int) -> None:
    shape = SHAPES[head_dim]
    x = inputs(shape)
    first = anchor_local_ordered(x.q, x.k, x.v, x.layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = anchor_local_ordered(x.q, x.k, x.v, x.layout)
    graph.replay()
    assert torch.equal(first, captured)


@hopper_only
def test_long_dense_calls_take_it_too() -> None:
    q, k, v = (torch.randn(1, 32_771, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert dense_implementation(q, k) == "gluon"
    assert dense_implementation(q[:, :4_000], k) == "sdpa"
    q_heads, k_heads, v_heads = (x.transpose(1, 2) for x in (q, k, v))
    exact = scaled_dot_product_attention(q_heads.double(), k_heads.double(), v_heads.double()).transpose(1, 2)
    eager = scaled_dot_product_attention(q_heads, k_heads, v_heads).transpose(1, 2)
    error, sdpa_error = ((x.double() - exact).norm() for x in (dense_attention(q, k, v, 128**-0.5), eager))
    assert error <= 1.2 * sdpa_error  # both round weights to bfloat16, in tiles of other sizes
