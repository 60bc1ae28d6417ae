"""Every candidate of benchmarks/kernels computes what the definition says."""

from dataclasses import replace

import pytest
import torch

from attention.anchor_local.reference import anchor_local_reference
from attention.layout import anchor_local_layout
from attention.pattern import AnchorLocalPattern
from attention.triton_tiles import TileConfig
from benchmarks.kernels.anchor_local import CANDIDATES, Candidate, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One of each kind, since in the interpreter tiles are small whatever the candidate says.
KINDS = sorted(
    {
        replace(candidate, config=TileConfig(32, 16, 4, 2))
        for candidates in CANDIDATES.values()
        for candidate in candidates.values()
        if not candidate.shipped
    },
    key=str,
)
# No tile is whole; only anchors' queries have whole tiles; both ranges have whole tiles and rests.
CASES = ((5, 8, 9), (40, 11, 30), (110, 50, 7))


@pytest.mark.parametrize(("tokens", "block_size", "stride"), CASES)
@pytest.mark.parametrize(
    "candidate", KINDS, ids=lambda c: f"{c.order}-{c.gathered}-{c.persistent}-{c.heads_ahead}"
)
def test_is_the_definition(candidate: Candidate, tokens: int, block_size: int, stride: int) -> None:
    pattern = AnchorLocalPattern(block_size, stride, 2)
    layout = anchor_local_layout(pattern, tokens, torch.device(DEVICE))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, 2, 16, generator=generator).to(DEVICE) for _ in range(3))
    truth = anchor_local_reference(q.double(), k.double(), v.double(), pattern, q_start=0, scale=0.25)
    q, k, v = (x[:, layout.key_order].contiguous() for x in (q, k, v))
    poisoned = torch.full_like(q, float("nan"))
    out = run(candidate, q, k, v, layout, 0.25, poisoned, programs=5)
    error = (out[:, layout.query_inverse] - truth).norm() / truth.norm()
    assert error < 1e-6


@pytest.mark.parametrize("head_dim", CANDIDATES)
def test_the_shipped_kernel_comes_first(head_dim: int) -> None:
    first, *others = CANDIDATES[head_dim].values()
    assert first.shipped
    assert not any(candidate.shipped for candidate in others)
