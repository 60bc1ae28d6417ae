"""Every family and variant on two ranks equals itself on one, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

import attention
from attention import ParallelReport, RankGroup, SwapReport
from tests.attention.families.running import assert_same, built, run
from tests.attention.families.variants import BY_NAME, GRID, Grid
from tests.ranks import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
# What needs tokens where they are is refused.
STAY = ("hunyuan_i2v", "skyreels_v2_forcing")
SHAREABLE = [name for name in BY_NAME if name not in STAY]
# Blocks of 20 of 105 tokens do not divide among ranks: one is cut.
RASTER: dict[str, Any] = {"block_size": 20, "anchor_stride": 7, "anchor_offset": 3}
TILES: dict[str, Any] = {"token_order": "tile", "tile_thw": (2, 2, 3), "anchor_stride": 5, "anchor_offset": 2}


def passes(
    ranks: RankGroup | None, /, name: str, grid: Grid = GRID, backend: str = "anchor_local", **settings: Any
) -> tuple[list[Tensor], SwapReport, ParallelReport | None]:
    """A sparse pass, with its first layer dense, and a dense one."""
    variant = BY_NAME[name]
    model = built(variant)
    with torch.no_grad(), attention.swap(model, backend, ranks=ranks, dense_layers=[0], **settings) as handle:
        sparse = run(model, variant, grid)
        handle.set_dense("dense_steps")
        return [sparse, run(model, variant, grid)], handle.report(), handle.parallel_report()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, RASTER) for name in SHAREABLE),
        *((name, TILES) for name in ("wan22_ti2v", "hunyuan", "mochi")),
    ],
    ids=[*(f"{name}-raster" for name in SHAREABLE), "wan22_ti2v-tile", "hunyuan-tile", "mochi-tile"],
)
def test_two_ranks_equal_one(pool: RankPool, name: str, settings: dict[str, Any]) -> None:
    expected, report, alone = passes(None, name, **settings)
    assert alone is None
    for outs, of_rank, parallel in pool.run(2, passes, name, **settings):
        for out, one in zip(outs, expected, strict=True):
            assert_same(BY_NAME[name], out, one)
        assert of_rank == report
        assert parallel is not None
        assert (parallel.ranks, parallel.sparse_exchange) == (2, "anchors")
        assert min(parallel.sparse_call_bytes, parallel.dense_call_bytes) > 0


@pytest.mark.parametrize("name", ["wan21_t2v", "cogvideox_5b", "hunyuan15_t2v"])
@pytest.mark.parametrize("unit", ["frames", "tokens"])
def test_windows_equal_one_rank(pool: RankPool, name: str, unit: str) -> None:
    settings: dict[str, Any] = {"window": (0, 1), "window_unit": unit, "global_frames": 1}
    expected, _, _ = passes(None, name, backend="window", **settings)
    for outs, _, parallel in pool.run(2, passes, name, backend="window", **settings):
        for out, one in zip(outs, expected, strict=True):
            assert_same(BY_NAME[name], out, one)
        assert parallel is not None
        assert (parallel.sparse_exchange, parallel.sparse_call_bytes) == ("heads", parallel.dense_call_bytes)


@pytest.mark.parametrize("name", STAY)
def test_tokens_that_must_stay_are_refused(pool: RankPool, name: str) -> None:
    with pytest.raises(AssertionError, match="needs all tokens in raster order in this mode, so 2 ranks"):
        pool.run(2, passes, name, **RASTER)


def test_heads_that_do_not_divide_are_refused(pool: RankPool) -> None:
    with pytest.raises(
        AssertionError, match=r"WanTransformer3DModel has 2 attention heads, which 3 ranks .* fit: 1, 2"
    ):
        pool.run(3, passes, "wan21_t2v", **RASTER)


def test_fewer_tokens_than_ranks_are_refused(pool: RankPool) -> None:
    with pytest.raises(AssertionError, match="a clip of 1 tokens cannot be shared by 2 ranks"):
        pool.run(2, passes, "wan21_t2v", (1, 1, 1), **RASTER)


def with_sinks(ranks: RankGroup) -> None:
    sinks = torch.zeros(2)
    model = built(BY_NAME["wan21_t2v"])
    attention.swap(model, "window", window=1, sinks=sinks, sink_mode="null_logit", ranks=ranks)


def with_a_cache(ranks: RankGroup) -> None:
    from diffusers import FirstBlockCacheConfig

    model = built(BY_NAME["wan21_t2v"])
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with attention.swap(model, ranks=ranks, block_size=20, anchor_stride=7):
        run(model, BY_NAME["wan21_t2v"])


def test_sinks_and_caches_are_refused(pool: RankPool) -> None:
    with pytest.raises(AssertionError, match="backend window with sinks runs on one rank only"):
        pool.run(2, with_sinks)
    with pytest.raises(AssertionError, match="a cache is enabled on this WanTransformer3DModel"):
        pool.run(2, with_a_cache)
