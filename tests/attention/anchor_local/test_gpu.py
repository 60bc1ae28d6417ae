"""What only a GPU can show: full sizes. Run with ``pytest -m gpu tests/attention/anchor_local``."""

import pytest
import torch

from attention import AnchorLocalPattern, anchor_local_layout
from attention.anchor_local.fp8_impl import anchor_local_fp8
from attention.anchor_local.reference import allowed
from attention.anchor_local.triton_impl import anchor_local_triton
from benchmarks.attention_accuracy import accuracy_rows
from benchmarks.attention_candidates import FP8_CONFIGS
from benchmarks.attention_cases import FP8_ERROR, Shape, inputs, truth
from benchmarks.kernels.anchor_local import CANDIDATES, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("heads", "head_dim"), [(32, 128), (48, 96)])  # descriptors, and pointers
def test_more_than_2_to_the_31_elements(heads: int, head_dim: int) -> None:
    tokens = 530_001
    assert tokens * heads * head_dim > 2**31
    pattern = AnchorLocalPattern(4096, 64, 3)
    q, k, v = (torch.randn(1, tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    layout = anchor_local_layout(pattern, tokens, q.device)
    out = anchor_local_triton(q, k, v, layout, head_dim**-0.5, out=torch.full_like(q, float("nan")))
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
