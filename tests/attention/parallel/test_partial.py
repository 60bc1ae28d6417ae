"""Attention in parts of the keys, merged, against float64 over all of them."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attention.parallel.partial import merged, partial_attention

SCALE = 0.7
DTYPES = [torch.float32, torch.bfloat16]


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * SCALE
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())


def check(device: str, dtype: torch.dtype, queries: int, head_dim: int) -> None:
    """Parts of very different sizes and scores: the merge must weigh them, not average."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, queries, 3, head_dim, generator=generator)
    k, v = (torch.randn(2, 421, 3, head_dim, generator=generator) for _ in range(2))
    k[:, 100:103] *= 4
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    expected = exact(q, k, v)
    bounds = [0, 100, 103, 421]
    parts = [partial_attention(q, k[:, begin:end], v[:, begin:end], SCALE) for begin, end in pairwise(bounds)]
    out = merged(torch.stack(parts), head_dim)
    assert out.dtype == dtype
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
    eager = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    # Each part is rounded once more than the whole.
    budget = 2 * (eager - expected).abs().max() + torch.finfo(dtype).eps * expected.abs().max()
    assert (out - expected).abs().max() <= budget


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 63, 100])
def test_merged_parts_are_the_whole(dtype: torch.dtype, queries: int) -> None:
    check("cpu", dtype, queries, 24)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("queries", [1, 63, 2000])
def test_merged_parts_are_the_whole_on_a_gpu(dtype: torch.dtype, queries: int, head_dim: int) -> None:
    """Each dtype and size has an operator of its own there, with its own shape of the log-sum-exp."""
    check("cuda", dtype, queries, head_dim)
