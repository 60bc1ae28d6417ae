"""The parts of benchmarks/selected.py that need no GPU."""

from dataclasses import replace

import pytest
import torch

from attention.selected.api import sparse_attn
from benchmarks.gpu import Timing
from benchmarks.selected import (
    GATHER_TILES,
    HEADER,
    SHAPES,
    Job,
    Row,
    Shape,
    compile_job,
    eager,
    errors,
    gather,
    inputs,
    jobs,
    line,
    tile_heads,
)
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
    kernel, portable = Timing(2e-3, 2e-3, 2e-3), Timing(3e-3, 3e-3, 3e-3)
    row = Row(SHAPE, "gluon", kernel, portable, 1.5e-3, 1e-3, 4e-3, 1e-3, 2e-3)
    assert row.share == pytest.approx(0.75)
    assert SHAPE.operations == 4 * 5 * 4 * 9 * 32
    cells = "1.00e-03 (2.00e-03) | gluon 2.000 ms | 0 | 1.500 ms | 1.000 ms | 0.75 | 3.000 ms | 4.00 ms | 2.0"
    assert line(row).endswith(f"| {cells} |")
    assert line(row).count("|") == len(HEADER) + 1


def test_what_is_compiled_beforehand_is_what_runs() -> None:
    """Of every shape: what is special in its list's length is not in the tile's."""
    widths = {shape.width for shape in SHAPES}
    kernels = {job.kernel for job in jobs()}
    assert {"auto", "triton", *GATHER_TILES} == kernels
    assert len(jobs()) == len(kernels) * len(widths)
    assert all(shape.listed % 16 == 0 for shape in SHAPES)
    assert {tile_heads(shape) for shape in SHAPES} == {64}
    small = replace(SHAPES[0], heads=2, width=16)
    for kernel in ("auto", "triton"):
        compile_job(Job(small, kernel), DEVICE)
