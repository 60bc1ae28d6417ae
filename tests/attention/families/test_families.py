"""Every family and variant: the swap against the stock model, with the explicit mask in float64."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import attention
from attention.anchor_local.reference import allowed
from attention.block_topk.reference import block_topk_reference
from attention.families import FAMILIES
from attention.layout import tile_anchors, tile_boxes
from attention.window_sink.reference import allowed as allowed_by_window
from attention.window_sink.window import Window
from tests.attention.families import running
from tests.attention.families.running import assert_same, expected_density, run, run_choosing, run_masked
from tests.attention.families.variants import BY_NAME, GRID, VARIANTS, Grid, Variant, tokens

# Mochi's rotary embedding asks for an autocast that a CPU does not have, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")
every = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """One of each; tests leave them as they were."""
    return {variant.name: running.built(variant) for variant in VARIANTS}


def raster_mask(block: int, stride: int, offset: int = 0, grid: Grid = GRID) -> Tensor:
    positions = torch.arange(tokens(grid))
    return allowed(attention.AnchorLocalPattern(block, stride, offset), positions, positions)


def tile_mask(pattern: attention.TilePattern, grid: Grid = GRID) -> Tensor:
    anchor, box = tile_anchors(pattern, grid), tile_boxes(pattern, grid)
    return anchor[:, None] | anchor[None, :] | (box[:, None] == box[None, :])


def window_mask(window: Window, grid: Grid = GRID) -> Tensor:
    positions = torch.arange(tokens(grid))
    return allowed_by_window(window, positions, positions)


def test_every_class_of_the_table_is_tested(models: dict[str, Any]) -> None:
    assert {type(model).__name__ for model in models.values()} == set(FAMILIES)
    assert len(VARIANTS) >= 10


@every
def test_raster_blocks_equal_the_mask(models: dict[str, Any], variant: Variant) -> None:
    model, mask = models[variant.name], raster_mask(20, 7, 3)
    dense = run(model, variant)
    with attention.swap(model, block_size=20, anchor_stride=7, anchor_offset=3) as handle:
        out = run(model, variant)
    assert_same(variant, out, run_masked(model, variant, mask))
    assert (out - dense).abs().max() > 1e-5 * dense.abs().max()  # else this could not tell sparse from dense
    report = handle.report()
    assert (report.sparse_calls, report.dense_calls) == (variant.layers, 0)
    assert (report.tokens, report.text_tokens) == (tokens(GRID), max(variant.valid))
    assert report.density == expected_density(variant, mask)


@every
def test_tiles_equal_the_mask(models: dict[str, Any], variant: Variant) -> None:
    model, pattern = models[variant.name], attention.TilePattern((2, 2, 3), 5, 2)
    with attention.swap(
        model, token_order="tile", tile_thw=(2, 2, 3), anchor_stride=5, anchor_offset=2
    ) as handle:
        out = run(model, variant)
    assert_same(variant, out, run_masked(model, variant, tile_mask(pattern)))
    assert handle.report().density == expected_density(variant, tile_mask(pattern))


@every
@pytest.mark.parametrize("unit", ["frames", "tokens"])
def test_windows_equal_the_mask(models: dict[str, Any], variant: Variant, unit: Any) -> None:
    model, frame = models[variant.name], GRID[1] * GRID[2]
    window = Window(0, 1, frame, frame) if unit == "frames" else Window(9, 4, 1, frame)
    sides = (window.left, window.right)
    with attention.swap(model, "window", window=sides, window_unit=unit, global_frames=1) as handle:
        out = run(model, variant)
    mask = window_mask(window)
    assert_same(variant, out, run_masked(model, variant, mask))
    assert handle.report().density == expected_density(variant, mask)


@every
def test_boxes_choose_as_the_definition_says(models: dict[str, Any], variant: Variant) -> None:
    model, pattern = models[variant.name], attention.BoxPattern((2, 2, 3), None, 7, 3)

    def definition(q: Tensor, k: Tensor, v: Tensor, text: int) -> Tensor:
        return block_topk_reference(
            q, k, v, pattern, GRID, top_k=0.5, pooled_rest=True, text=text, scale=q.shape[-1] ** -0.5
        )

    dense = run(model, variant)
    with attention.swap(
        model,
        "block_topk",
        tile_thw=(2, 2, 3),
        anchor_stride=7,
        anchor_offset=3,
        top_k=0.5,
        pooled_rest=True,
    ) as handle:
        out = run(model, variant)
    assert_same(variant, out, run_choosing(model, variant, definition))
    assert (out - dense).abs().max() > 1e-6 * dense.abs().max()
    report = handle.report()
    assert (report.sparse_calls, report.dense_calls, report.tile_thw) == (variant.layers, 0, (2, 2, 3))
    assert (report.top_k, report.pooled_rest, report.anchor_stride) == (0.5, True, 7)


@every
def test_stride_one_and_dense_passes_equal_the_stock_model(models: dict[str, Any], variant: Variant) -> None:
    model = models[variant.name]
    dense = run(model, variant)
    with attention.swap(model, block_size=4, anchor_stride=1) as handle:
        assert_same(variant, run(model, variant), dense)
    assert handle.report().sparse_calls == variant.layers
    with attention.swap(model, block_size=4, anchor_stride=5, dense_layers=[0]) as handle:
        handle.set_dense("dense_steps")
        assert_same(variant, run(model, variant), dense)
        handle.set_dense(None)
        assert (run(model, variant) - dense).abs().max() > 1e-6
    assert handle.report().dense_reasons == {"dense_steps": variant.layers, "dense_layers": 1}
    with attention.swap(model, "dense"):
        assert_same(variant, run(model, variant), dense)


# The 2b's table of positions is for one grid.
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.name != "cogvideox_2b"], ids=lambda v: v.name)
@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 5, 2), (5, 3, 4)])
def test_other_grids_equal_the_mask(models: dict[str, Any], variant: Variant, grid: Grid) -> None:
    model, pattern = models[variant.name], attention.TilePattern((2, 2, 3), 4)
    with attention.swap(model, token_order="tile", tile_thw=(2, 2, 3), anchor_stride=4):
        out = run(model, variant, grid)
    assert_same(variant, out, run_masked(model, variant, tile_mask(pattern, grid), grid))


@every
def test_removal_is_exact(models: dict[str, Any], variant: Variant) -> None:
    model = models[variant.name]
    before = run(model, variant)
    attending = [module for module in model.modules() if hasattr(module, "processor")]
    processors = [module.processor for module in attending]
    state = [copy.copy(vars(processor)) for processor in processors]
    with attention.swap(model, block_size=20, anchor_stride=7):
        run(model, variant)
        own = [old is new.processor for old, new in zip(processors, attending, strict=True)]
        assert own.count(False) == variant.layers  # and no other module has another processor
    assert all(old is new.processor for old, new in zip(processors, attending, strict=True))
    assert state == [vars(processor) for processor in processors]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(run(model, variant), before)


@every
def test_other_attention_is_never_touched(
    models: dict[str, Any], variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cross-attention and text refiners call PyTorch as before; self-attention does not any more."""
    model, calls = models[variant.name], []
    attend = functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        calls.append((query.shape[2], key.shape[2]))
        return attend(query, key, value, **more)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    run(model, variant)
    stock, video = calls.copy(), tokens(GRID)
    calls.clear()
    with attention.swap(model, block_size=20, anchor_stride=7):
        run(model, variant)
    assert calls == [(q, k) for q, k in stock if not q == k >= video]
    assert len(stock) > len(calls)


class LargestMask(TorchDispatchMode):
    """Entries of the largest boolean tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.bool:
            self.entries = max(self.entries, out.numel())
        return out


@every
def test_no_mask_of_all_pairs_is_built(models: dict[str, Any], variant: Variant) -> None:
    """Stock HunyuanVideo 1.5 builds one in every layer: 12.9 GB for a clip of 720p."""
    model = models[variant.name]
    with LargestMask() as stock:
        run(model, variant)
    with attention.swap(model, block_size=20, anchor_stride=7), LargestMask() as swapped:
        run(model, variant)
    assert swapped.entries < tokens(GRID) ** 2 / 10
    if variant.name.startswith("hunyuan15"):
        assert stock.entries > tokens(GRID) ** 2  # else this could not tell


ONE_OF_EACH = [
    "wan21_t2v",
    "wan21_i2v",
    "wan_vace",
    "skyreels_v2",
    "cogvideox_5b",
    "hunyuan",
    "hunyuan15_i2v",
    "ltx_t2v",
    "mochi",
]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_lora_stays_in_force(name: str) -> None:
    variant = BY_NAME[name]
    model = running.built(variant)
    plain = run(model, variant)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        targets = ["to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "to_add_out"]
        model.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    model.double()
    with attention.swap(model, block_size=20, anchor_stride=7):
        out = run(model, variant)
    expected = run_masked(model, variant, raster_mask(20, 7))
    assert_same(variant, out, expected)
    model.disable_adapters()
    assert_same(variant, run(model, variant), plain)
    assert (run_masked(model, variant, raster_mask(20, 7)) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "wan22_ti2v"])
def test_compiled_blocks_have_no_graph_break(models: dict[str, Any], name: str) -> None:
    variant = BY_NAME[name]
    model = copy.deepcopy(models[name])
    blocks = {
        m for n, m in model.named_modules() if n.rpartition(".")[0].endswith("blocks") and "refiner" not in n
    }
    for block in blocks:
        block.compile(fullgraph=True, backend="eager")
    with attention.swap(model, block_size=20, anchor_stride=7, dense_layers=[1]) as handle:
        run(model, variant)
    with attention.swap(model, block_size=20, anchor_stride=7) as handle:
        out = run(model, variant)
    assert handle.report().sparse_calls == variant.layers
    assert_same(variant, out, run_masked(models[name], variant, raster_mask(20, 7)))
