"""What else hooks into a transformer while attention is swapped: caches, offloading, rotation of anchors."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.hooks import apply_group_offloading
from torch import Tensor

import attention
from attention.anchor_local.reference import allowed
from tests.attention.families import running
from tests.attention.families.running import assert_same, run, run_masked
from tests.attention.families.variants import BY_NAME, GRID, Variant, tokens

NAMES = ["wan21_t2v", "cogvideox_5b", "hunyuan", "ltx_t2v"]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> tuple[Variant, Any]:
    variant = BY_NAME[request.param]
    return variant, running.built(variant)


def raster_mask(block: int, stride: int, offset: int = 0) -> Tensor:
    positions = torch.arange(tokens(GRID))
    return allowed(attention.AnchorLocalPattern(block, stride, offset), positions, positions)


def later(variant: Variant) -> dict[str, Any]:
    """Arguments of the next denoise step."""
    arguments = running.arguments(variant)
    return arguments | {
        "timestep": arguments["timestep"] - 40,
        "hidden_states": 0.9 * arguments["hidden_states"],
    }


def test_first_block_cache_carries_tokens_in_one_order(case: tuple[Variant, Any]) -> None:
    """A dense step, then a sparse one that skips all blocks but the first and adds what the cache kept."""
    variant, model = case[0], copy.deepcopy(case[1])
    config = FirstBlockCacheConfig(threshold=1e9)
    model.enable_cache(config)
    with model.cache_context("cond"):
        run(model, variant)
        with running.masked(variant, raster_mask(20, 7)) as calls:
            expected = model(**later(variant), return_dict=False)[0]
    assert calls == [1]
    model.disable_cache()
    with attention.swap(model, block_size=20, anchor_stride=7) as handle:
        model.enable_cache(config)
        with model.cache_context("cond"):
            handle.set_dense("dense_steps")
            run(model, variant)
            handle.set_dense(None)
            out = model(**later(variant), return_dict=False)[0]
    assert_same(variant, out, expected)
    report = handle.report()
    assert (report.sparse_calls, report.dense_calls) == (1, variant.layers)


@pytest.mark.parametrize("offload_type", ["block_level", "leaf_level"])
def test_group_offloading_works_under_a_swap(case: tuple[Variant, Any], offload_type: str) -> None:
    variant, model = case[0], copy.deepcopy(case[1])
    apply_group_offloading(
        model, onload_device=torch.device("cpu"), offload_type=offload_type, num_blocks_per_group=1
    )
    with attention.swap(model, block_size=20, anchor_stride=7) as handle:
        out = run(model, variant)
    assert_same(variant, out, run_masked(case[1], variant, raster_mask(20, 7)))
    assert handle.report().sparse_calls == variant.layers
    assert torch.equal(run(model, variant), run(case[1], variant))


def test_anchors_rotate_by_one_token_a_step(case: tuple[Variant, Any]) -> None:
    variant, model = case
    with attention.swap(
        model, block_size=20, anchor_stride=7, anchor_offset=5, anchor_rotation=True
    ) as handle:
        for step, offset in ((0, 5), (1, 6), (2, 0), (9, 0), (1, 6)):
            handle.set_step(step)
            expected = run_masked_outside(case, raster_mask(20, 7, offset))
            assert_same(variant, run(model, variant), expected)
    assert (handle.report().anchor_offset, handle.report().anchor_rotation) == (5, True)


def run_masked_outside(case: tuple[Variant, Any], mask: Tensor) -> Tensor:
    """With the mask in a copy of the model that is not swapped."""
    stock = running.built(case[0])
    return run_masked(stock, case[0], mask)


def test_without_rotation_steps_are_alike(case: tuple[Variant, Any]) -> None:
    variant, model = case
    with attention.swap(model, block_size=20, anchor_stride=7) as handle:
        first = run(model, variant)
        handle.set_step(3)
        assert torch.equal(run(model, variant), first)


def test_rotation_under_a_cache_is_refused(case: tuple[Variant, Any]) -> None:
    variant, model = case[0], copy.deepcopy(case[1])
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with (
        attention.swap(model, block_size=20, anchor_stride=7, anchor_rotation=True),
        pytest.raises(ValueError, match="anchor_rotation changes the order of tokens between steps"),
    ):
        run(model, variant)
