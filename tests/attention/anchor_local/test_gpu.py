"""What only a GPU can show: full sizes. Run with ``pytest -m gpu tests/attention/anchor_local``."""

import pytest
import torch

from attention import AnchorLocalPattern, anchor_local_layout
from attention.anchor_local.reference import allowed
from attention.anchor_local.triton_impl import anchor_local_triton

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
