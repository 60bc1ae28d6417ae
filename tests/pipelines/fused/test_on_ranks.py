"""Fused blocks that need little memory, on ranks that share the tokens: heads stay together there."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from attention import ParallelReport, RankGroup, SwapReport, swap
from pipelines.feed_forward import sliced_feed_forward
from pipelines.fused import wan
from pipelines.fused.wan import fuse_blocks
from pipelines.joined_attention import join_projections
from tests.attention.families.running import arguments, built
from tests.attention.families.variants import BY_NAME
from tests.ranks import RankPool

PLAIN = BY_NAME["wan21_t2v"]
# Ranks share anchors, or heads, of which one rank has all tokens then.
SWAPS: list[dict[str, Any]] = [
    {"backend": "anchor_local", "block_size": 20, "anchor_stride": 7},
    {"backend": "window", "window": 1},
]


def one_pass(
    ranks: RankGroup | None, settings: dict[str, Any], chunks: int
) -> tuple[Tensor, SwapReport, ParallelReport | None]:
    model = built(PLAIN).float()
    join_projections(model)
    fuse_blocks(model)
    given = arguments(PLAIN, dtype=torch.float32)
    with (
        patch.object(wan, "MOST_NARROW_CHANNELS", 0),  # also in a rank's process
        torch.no_grad(),
        sliced_feed_forward([model], chunks),
        swap(model, ranks=ranks, **settings) as handle,
    ):
        out: Tensor = model(**given, return_dict=False)[0]
        return out, handle.report(), handle.parallel_report()


def test_two_ranks_say_and_move_the_same() -> None:
    with RankPool(2) as pool:
        for settings in SWAPS:
            expected, report, _ = one_pass(None, settings, 2)
            whole, lean = (pool.run(2, one_pass, settings, chunks) for chunks in (1, 2))
            for (_, _, moved), (out, of_rank, moved_lean) in zip(whole, lean, strict=True):
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
                assert of_rank == report
                assert moved_lean == moved
