"""What else hooks into a transformer while attention is swapped: caches, offloading, rotation of anchors."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import accelerate  # type: ignore[import-untyped]
import pytest
import torch
from accelerate.hooks import CpuOffload, add_hook_to_module  # type: ignore[import-untyped]
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks import SeaCacheConfig, apply_group_offloading
from torch import Tensor

import attention
from attention.anchor_local.reference import allowed
from tests.attention.families import running
from tests.attention.families.running import assert_same, run, run_masked
from tests.attention.families.variants import BATCH, BY_NAME, GRID, Variant, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
    pytest.mark.filterwarnings("ignore:torch.meshgrid"),  # FasterCache's
]

NAMES = ["wan21_t2v", "cogvideox_5b", "hunyuan", "ltx_t2v"]
# Caches of whole blocks look up what a block gives back by its class. Diffusers 0.42 knows neither that of
# SkyReels V2 nor that of HunyuanVideo 1.5, and refuses them: "Model class ... not registered".
KNOWN_BLOCKS = [*NAMES, "wan21_i2v", "wan_vace", "hunyuan_i2v", "mochi"]
ALL = [*KNOWN_BLOCKS, "skyreels_v2_forcing", "hunyuan15_i2v"]
of_four = pytest.mark.parametrize("case", NAMES, indirect=True)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=ALL)
def case(request: pytest.FixtureRequest) -> tuple[Variant, Any]:
    variant = BY_NAME[request.param]
    return variant, running.built(variant)


def raster_mask(block: int, stride: int, offset: int = 0) -> Tensor:
    positions = torch.arange(tokens(GRID))
    return allowed(attention.AnchorLocalPattern(block, stride, offset), positions, positions)


def later(variant: Variant, step: int = 1) -> dict[str, Any]:
    """Arguments of a later denoise step."""
    arguments = running.arguments(variant)
    return arguments | {
        "timestep": arguments["timestep"] - 40 * step,
        "hidden_states": 0.9**step * arguments["hidden_states"],
    }


@pytest.mark.parametrize("case", KNOWN_BLOCKS, indirect=True)
def test_first_block_cache_carries_tokens_in_one_order(case: tuple[Variant, Any]) -> None:
    """A dense step, then a sparse one that skips all blocks but the first and adds what the cache kept."""
    variant, model = case[0], copy.deepcopy(case[1])
    config = FirstBlockCacheConfig(threshold=1e9)
    model.enable_cache(config)
    with model.cache_context("cond"):
        run(model, variant)
        with running.masked(variant, raster_mask(20, 7)) as calls:
            expected = model(**later(variant), return_dict=False)[0]
    # All blocks of VACE's control run before the first.
    computed = 1 + len(getattr(model, "vace_blocks", ()))
    assert calls == [computed * (BATCH if variant.drops_padding else 1)]
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
    assert (report.sparse_calls, report.dense_calls) == (computed, variant.layers)


STEPS = 4
SELF_ATTENTION = [r"(vace_|(single_)?transformer_)?blocks\.\d+\.attn1?"]
# What each cache is, and the variants that Diffusers runs it on.
CACHES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "mag": (
        lambda: MagCacheConfig(
            threshold=1e9,
            max_skip_steps=2,
            retention_ratio=0.3,
            num_inference_steps=STEPS,
            mag_ratios=[1.0] * STEPS,
        ),
        KNOWN_BLOCKS,
    ),
    "taylor_seer": (
        lambda: TaylorSeerCacheConfig(
            cache_interval=3,
            disable_cache_before_step=2,
            taylor_factors_dtype=torch.float64,
            cache_identifiers=SELF_ATTENTION,
        ),
        ALL,
    ),
    "taylor_seer_lite": (
        lambda: TaylorSeerCacheConfig(
            cache_interval=3,
            disable_cache_before_step=2,
            taylor_factors_dtype=torch.float64,
            use_lite_mode=True,
        ),
        ALL,
    ),
    "pyramid": (
        lambda: PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            cross_attention_block_skip_range=2,
            current_timestep_callback=lambda: 500,
        ),
        ALL,
    ),
    # Steps 1 and 2 have the conditional half of the batch only; step 1 has no attention. It halves a few
    # arguments by name, and leaves those for images, pooled or second texts and VACE's control whole: stock
    # models fail, or take what is the other half's (HunyuanVideo 1.5). Nor does it take packed latents (LTX).
    "faster": (
        lambda: FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 1000),
            unconditional_batch_skip_range=3,
            unconditional_batch_timestep_skip_range=(-1, 1000),
            attention_weight_callback=lambda module: 0.5,
            current_timestep_callback=lambda: 500,
        ),
        ["wan21_t2v", "skyreels_v2_forcing", "cogvideox_5b", "mochi"],
    ),
    # Diffusers knows what to compare between steps for Wan alone.
    "sea": (lambda: SeaCacheConfig(threshold=1e9, retention_steps=1), ["wan21_t2v"]),
}


def steps(variant: Variant, model: Any, config: Any, as_is: Callable[[bool], Any]) -> list[Tensor]:
    """Outputs of a few denoise steps under a cache, ``as_is`` around each: it is told whether it is dense."""
    model.enable_cache(config)
    outs = []
    for step in range(STEPS):
        scheduled = {"step_index": step, "sigma": 1 - step / STEPS, "num_inference_steps": STEPS}
        with model.cache_context("cond", **scheduled), as_is(step == 0):
            outs.append(model(**later(variant, step), return_dict=False)[0])
    model.disable_cache()
    return outs


@pytest.mark.parametrize(
    ("cache", "name"), [(cache, name) for cache, (_, names) in CACHES.items() for name in names]
)
def test_caches_answer_as_in_the_stock_model(cache: str, name: str) -> None:
    """The first step is dense; what is kept of it goes into sparse ones."""
    variant, build = BY_NAME[name], CACHES[cache][0]
    stock, model = running.built(variant), running.built(variant)
    mask = raster_mask(20, 7)

    def masked(dense: bool) -> Any:
        return contextlib.nullcontext() if dense else running.masked(variant, mask)

    expected = steps(variant, stock, build(), masked)
    with attention.swap(model, block_size=20, anchor_stride=7) as handle:

        def swapped(dense: bool) -> Any:
            handle.set_dense("dense_steps" if dense else None)
            return contextlib.nullcontext()

        outs = steps(variant, model, build(), swapped)
    report = handle.report()
    assert report.dense_calls == variant.layers
    assert 0 < report.sparse_calls < (STEPS - 1) * variant.layers  # else the cache did nothing
    for out, said in zip(outs, expected, strict=True):
        if cache == "faster":  # which makes up outputs by a Fourier transform in float32
            torch.testing.assert_close(out, said, rtol=1e-5, atol=1e-5)
        else:
            assert_same(variant, out, said)


def offload(model: Any, kind: str) -> None:
    """As Diffusers does for a transformer, or with Accelerate for a pipeline; only to where it is already."""
    cpu = torch.device("cpu")
    if kind == "sequential":
        accelerate.cpu_offload(model, execution_device=cpu)
    elif kind == "model":
        add_hook_to_module(model, CpuOffload(execution_device=cpu))
    else:
        apply_group_offloading(model, onload_device=cpu, offload_type=kind, num_blocks_per_group=1)


@pytest.mark.parametrize("kind", ["block_level", "leaf_level", "sequential", "model"])
def test_offloading_works_under_a_swap(case: tuple[Variant, Any], kind: str) -> None:
    variant, model = case[0], copy.deepcopy(case[1])
    offload(model, kind)
    with attention.swap(model, block_size=20, anchor_stride=7) as handle:
        out = run(model, variant)
    assert_same(variant, out, run_masked(case[1], variant, raster_mask(20, 7)))
    assert handle.report().sparse_calls == variant.layers
    assert torch.equal(run(model, variant), run(case[1], variant))


@of_four
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


@of_four
def test_without_rotation_steps_are_alike(case: tuple[Variant, Any]) -> None:
    variant, model = case
    with attention.swap(model, block_size=20, anchor_stride=7) as handle:
        first = run(model, variant)
        handle.set_step(3)
        assert torch.equal(run(model, variant), first)


@of_four
def test_rotation_under_a_cache_is_refused(case: tuple[Variant, Any]) -> None:
    variant, model = case[0], copy.deepcopy(case[1])
    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with (
        attention.swap(model, block_size=20, anchor_stride=7, anchor_rotation=True),
        pytest.raises(ValueError, match="anchor_rotation changes the order of tokens between steps"),
    ):
        run(model, variant)
