"""The parts of benchmarks/selected.py that need no GPU."""

import pytest
import torch

from attention.selected.api import sparse_attn
from benchmarks.gpu import Timing
from benchmarks.selected import Row, Shape, eager, errors, gather, inputs, table
from tests.attention.selected.helpers import DEVICE

SHAPE = Shape(queries=5, heads=4, width=32, window=6, selected=3, entries=7)


def test_lists_are_windows_and_distinct_entries() -> None:
    x = inputs(SHAPE, DEVICE)
    assert x.topk_idxs.shape == (1, 5, 9)
    for query, listed in enumerate(x.topk_idxs[0].tolist()):
        assert listed[:6] == list(range(query, query + 6))
        assert len(set(listed[6:])) == 3
        assert all(11 <= row < 18 for row in listed[6:])
    sparse_attn(x.q, x.kv, x.sink, x.topk_idxs, checked=True)


def test_eager_is_the_same_maths() -> None:
    error, eager_error = errors(SHAPE, DEVICE)
    assert 0 < error <= eager_error < 2**-6
    x = inputs(SHAPE, DEVICE)
    torch.testing.assert_close(eager(x), sparse_attn(x.q, x.kv, x.sink, x.topk_idxs), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("width", [32, 40])
def test_the_gather_reads_every_listed_row(width: int) -> None:
    x = inputs(Shape(queries=3, heads=4, width=width, window=16, selected=16, entries=20), DEVICE)
    out = gather(x, 2, 16, 4, 3)
    sums = x.kv[0].float()[x.topk_idxs[0].long()].sum(1)
    expected = sums[None, :, None].expand(x.q.shape).bfloat16()
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


def test_the_roofline_is_the_larger_floor() -> None:
    row = Row(SHAPE, Timing(2e-3, 2e-3, 2e-3), 1.5e-3, 1e-3, 4e-3, 0.0, 0.0)
    assert row.share == pytest.approx(0.75)
    assert SHAPE.operations == 4 * 5 * 4 * 9 * 32
    assert "| 2.000 ms | 0 | 1.500 ms | 1.000 ms | 0.75 | 4.00 ms | 2.0 |" in table([row])
