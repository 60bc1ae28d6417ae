"""Hopper's kernel as threads on the CPU, against the definition in float64."""

import pytest
import torch

from attention.block_topk import hopper
from attention.block_topk.selection import kept_pairs
from attention.hopper_tiles import HopperConfig
from tests.attention.block_topk.helpers import Case, budget, exact, inputs, relative_error, selection
from tests.attention.emulated_gluon import emulated

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, it runs there")

# Tiles have 128 keys, items 128 or 192 queries: boxes below, at and above that; a last group without queries;
# whole tiles of the first keys and what is left of them; nothing but partial tiles.
CASES = (
    Case((3, 4, 5), 3, tile_thw=(2, 2, 3), kv_heads=1, head_dim=64),
    Case((3, 10, 13), 0.3, tile_thw=(3, 5, 7), kv_heads=1, batch=2, head_dim=128, pooled_rest=True),
    Case((3, 10, 13), 0.3, tile_thw=(3, 5, 3), anchor_stride=5, text=3, heads=1, kv_heads=1, head_dim=128),
    Case((1, 20, 33), 2, block_size=201, heads=1, kv_heads=1, head_dim=64, pooled_rest=True),
    Case((1, 16, 24), 0.4, block_size=128, heads=1, kv_heads=1, head_dim=128),  # whole tiles only
    Case((2, 3, 4), 2, block_size=5, anchor_stride=1, head_dim=64, pooled_rest=True),  # all anchors: dense
    Case((2, 3, 3), 1, tile_thw=(4, 4, 4), head_dim=128, pooled_rest=True),  # one box: dense
)
RUNS = [
    *((case, torch.bfloat16, None) for case in CASES),
    (CASES[1], torch.float16, None),
    # Several tiles of mean keys, an odd ring.
    (
        Case((1, 5, 26), 5, block_size=5, text=30, heads=1, kv_heads=1, head_dim=64, pooled_rest=True),
        torch.bfloat16,
        HopperConfig(groups=2, block_n=16, stages=3, registers=240, overlap=False),
    ),
]


@pytest.mark.parametrize(("case", "dtype", "config"), RUNS, ids=str)
def test_equals_the_definition(case: Case, dtype: torch.dtype, config: HopperConfig | None) -> None:
    q, k, v = inputs(case, dtype)
    _, selected = selection(case, q, k, "triton")
    truth = exact(case, q, k, v, selected)
    allowed = budget(case, q, k, v, selected, truth)
    layout = case.layout()
    q, k, v = (x.index_select(1, layout.order) for x in (q, k, v))
    out, tally = torch.full_like(q, float("nan")), torch.zeros((), dtype=torch.int64)
    with emulated(hopper, processors=3):
        hopper.block_topk_hopper(
            q,
            k,
            v,
            layout,
            top_k=case.top_k,
            pooled_rest=case.pooled_rest,
            scale=case.scale,
            tally=tally,
            config=config,
            out=out,
        )
    assert relative_error(out.index_select(1, layout.inverse), truth) <= allowed
    assert int(tally) == int(kept_pairs(selected, layout))
