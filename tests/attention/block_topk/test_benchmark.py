"""The benchmark's check of errors and density, on a small clip; the rest of it needs a GPU."""

from typing import Any

import pytest
import torch

from attention.block_topk import hopper
from attention.block_topk.api import kernel
from attention.block_topk.triton_impl import block_topk_triton, select
from benchmarks.block_topk import (
    SHAPES,
    Shape,
    attention_alone,
    compile_shape,
    counted_density,
    errors,
    groups,
    ordered_inputs,
)
from tests.attention.block_topk.helpers import DEVICE
from tests.attention.emulated_gluon import emulated


@pytest.mark.parametrize("anchor_stride", [None, 5])
def test_errors_are_of_the_boxes_that_were_kept(anchor_stride: int | None) -> None:
    shape = Shape((2, 4, 4), 1, 32, (1, 2, 4), top_k=2, pooled_rest=True, anchor_stride=anchor_stride)
    q, k, v = ordered_inputs(shape, DEVICE)
    layout = shape.layout(q.device)
    tally = torch.zeros((), dtype=torch.int64, device=q.device)
    out = block_topk_triton(
        q, k, v, layout, top_k=shape.top_k, pooled_rest=True, scale=shape.scale, tally=tally
    )
    error, eager_error = errors(shape, layout, q, k, v, out)
    assert 0 < error <= eager_error + torch.finfo(q.dtype).eps
    assert errors(shape, layout, q, k, v, out.flip(1))[0] > 10 * eager_error
    if anchor_stride is None:  # 4 boxes of 8 in a ring of frames and halves; each touches 2 and keeps 3
        assert counted_density(shape, layout, tally) == 3 / 4


def test_groups_hold_all_shapes_of_one_dense_attention() -> None:
    found = groups(SHAPES)
    assert sorted(map(repr, SHAPES)) == sorted(repr(shape) for group in found for shape in group)
    kinds = [{(shape.grid, shape.heads, shape.head_dim) for shape in group} for group in found]
    assert all(len(kind) == 1 for kind in kinds)
    assert len(set.union(*kinds)) == len(found)


@pytest.mark.parametrize("pooled_rest", [False, True])
def test_a_shape_runs_with_one_head(pooled_rest: bool) -> None:
    compile_shape(Shape((2, 4, 4), 3, 32, (1, 2, 4), top_k=2, pooled_rest=pooled_rest), "triton", DEVICE)


@pytest.mark.skipif(DEVICE == "cuda", reason="Hopper's kernel is emulated")
def test_hoppers_attention_alone_is_that_of_the_whole_call() -> None:
    shape = Shape((2, 4, 4), 1, 64, (1, 2, 4), top_k=2)
    q, k, v = ordered_inputs(shape, DEVICE)
    layout = shape.layout(q.device)
    settings: dict[str, Any] = {
        "top_k": shape.top_k,
        "pooled_rest": False,
        "scale": shape.scale,
        "tally": None,
    }
    attend, block_n = attention_alone("gluon", q)
    with emulated(hopper, processors=2):
        lists, rest = select(q, k, v, layout, block_n=block_n, **settings)
        alone = attend(q, k, v, layout, lists, rest, scale=shape.scale)
        assert torch.equal(alone, kernel("gluon")(q, k, v, layout, **settings))
    assert bool(alone.isfinite().all())
