"""The swap in a real (tiny) Wan transformer, against the dense model and against the mask on every layer."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import diffusers.models.transformers.transformer_wan as transformer_wan
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attention
from attention.anchor_local.reference import allowed
from attention.registry import BACKENDS
from configs.attention import AttentionBackend
from tests.attention import tiny_transformer
from tests.attention.tiny_transformer import GRID, LAYERS, TEXT_TOKENS, TOKENS, Grid, run

PATTERNS = [(20, 7, 3), (35, 4, 0), (3, 13, 0), (104, 50, 49)]


@pytest.fixture(scope="module")
def transformer() -> WanTransformer3DModel:
    return tiny_transformer.tiny_transformer()


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def run_masked(transformer: Any, pattern: attention.AnchorLocalPattern, grid: Grid = GRID) -> Tensor:
    """The same model with the boolean mask in self-attention, in raster order."""
    positions = torch.arange(grid[0] * grid[1] * grid[2])
    return tiny_transformer.run_masked(transformer, allowed(pattern, positions, positions), grid)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("block", "stride", "offset"), PATTERNS)
def test_swapped_model_equals_masked_model(
    transformer: Any, block: int, stride: int, offset: int, impl: Any
) -> None:
    expected = run_masked(transformer, attention.AnchorLocalPattern(block, stride, offset))
    dense = run(transformer)
    with attention.swap(
        transformer, block_size=block, anchor_stride=stride, anchor_offset=offset, impl=impl
    ) as handle:
        out = run(transformer)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert (out - dense).abs().max() > 1e-4  # else this test could not tell sparse from dense
    report = handle.report()
    assert (report.implementation, report.sparse_calls, report.dense_calls) == (impl, LAYERS, 0)
    assert report.density == attention.density(TOKENS, block, stride, offset)


@pytest.fixture(scope="module")
def exact_transformer(transformer: Any) -> Any:
    """The same model in float64."""
    return copy.deepcopy(transformer).double()


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(2, 5), st.integers(1, 30), st.data())
def test_any_grid_and_pattern_equals_the_mask(
    exact_transformer: Any, frames: int, rows: int, columns: int, stride: int, data: st.DataObject
) -> None:
    grid = (frames, rows, columns)
    tokens = frames * rows * columns
    if tokens == TEXT_TOKENS:
        return  # run_masked tells cross-attention by its length
    block = data.draw(st.integers(1, tokens + 5))
    pattern = attention.AnchorLocalPattern(block, stride, data.draw(st.integers(0, stride - 1)))
    with attention.swap(
        exact_transformer, block_size=block, anchor_stride=stride, anchor_offset=pattern.anchor_offset
    ) as handle:
        out = run(exact_transformer, grid=grid)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, run_masked(exact_transformer, pattern, grid), rtol=1e-12, atol=1e-12)
    assert handle.report().density == attention.density(tokens, block, stride, pattern.anchor_offset)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_stride_one_is_the_dense_model(transformer: Any, impl: Any) -> None:
    dense = run(transformer)
    with attention.swap(transformer, block_size=10, anchor_stride=1, impl=impl):
        torch.testing.assert_close(run(transformer), dense, rtol=1e-5, atol=1e-5)


def test_removal_is_exact(transformer: Any) -> None:
    before = run(transformer)
    processors = [module.processor for module in transformer.modules() if hasattr(module, "processor")]
    state = [copy.copy(vars(processor)) for processor in processors]
    handle = attention.swap(transformer, block_size=20, anchor_stride=7)
    run(transformer)
    handle.remove()
    handle.remove()
    after = [module.processor for module in transformer.modules() if hasattr(module, "processor")]
    assert all(a is b for a, b in zip(processors, after, strict=True))
    assert state == [vars(processor) for processor in after]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in transformer.modules())
    assert torch.equal(run(transformer), before)


def test_cross_attention_is_never_swapped(transformer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if one processor object serves both kinds of attention, as after set_attn_processor(one)."""
    shared = transformer_wan.WanAttnProcessor()
    transformer = copy.deepcopy(transformer)
    for block in transformer.blocks:
        block.attn1.processor = block.attn2.processor = shared
    backends: list[tuple[int, object]] = []
    dispatch = transformer_wan.dispatch_attention_fn

    def spy(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        backends.append((key.shape[1], kwargs["backend"]))
        return dispatch(query, key, value, **kwargs)

    monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", spy)
    with attention.swap(transformer, block_size=20, anchor_stride=7) as handle:
        run(transformer)
    assert handle.report().sparse_calls == LAYERS
    assert [backend is None for length, backend in backends if length != TOKENS] == [True] * LAYERS
    assert [backend is None for length, backend in backends if length == TOKENS] == [False] * LAYERS
    assert shared._attention_backend is None


def test_one_timestep_for_each_token_follows_its_token(transformer: Any) -> None:
    timestep = torch.randint(0, 1000, (2, TOKENS), generator=torch.Generator().manual_seed(1)).float()
    dense = run(transformer, timestep)
    # 105 tokens in one block less one token: all but token 104 see each other, and it is an anchor.
    with attention.swap(transformer, block_size=104, anchor_stride=105, anchor_offset=104) as handle:
        out = run(transformer, timestep)
    assert handle.report().sparse_calls == LAYERS
    torch.testing.assert_close(out, dense, rtol=1e-5, atol=1e-5)
    assert (run(transformer, timestep.flip(1)) - dense).abs().max() > 1e-3


def test_dense_calls_are_counted_by_reason(transformer: Any) -> None:
    dense = run(transformer)
    with attention.swap(transformer, block_size=20, anchor_stride=7, dense_layers=[1]) as handle:
        handle.set_dense("dense_steps")
        torch.testing.assert_close(run(transformer), dense, rtol=1e-5, atol=1e-5)
        handle.set_dense(None)
        run(transformer)
    report = handle.report()
    assert report.dense_reasons == {"dense_steps": LAYERS, "dense_layers": 1}
    assert (report.sparse_calls, report.dense_calls, report.tokens) == (LAYERS - 1, LAYERS + 1, TOKENS)

    with attention.swap(transformer, block_size=20, anchor_stride=7, min_tokens=TOKENS + 1) as handle:
        assert torch.equal(run(transformer), dense)
    assert handle.report().dense_reasons == {"min_tokens": LAYERS}
    assert handle.report().density == 1.0

    with attention.swap(transformer, "dense") as handle:
        assert torch.equal(run(transformer), dense)
    report = handle.report()
    assert (report.dense_reasons, report.implementation, report.block_size) == (
        {"backend": LAYERS},
        "sdpa",
        None,
    )


def test_dense_layers_are_those_layers(transformer: Any) -> None:
    sparse_at: list[int] = []
    model = copy.deepcopy(transformer)
    with attention.swap(model, block_size=20, anchor_stride=7, dense_layers=[0, 2]) as handle:
        for block in model.blocks:
            block.attn1.register_forward_hook(lambda *_: sparse_at.append(handle.report().sparse_calls))
        run(model)
    assert sparse_at == [0, 1, 1]


def test_state_is_clean_after_a_failed_forward(transformer: Any) -> None:
    dense = run(transformer)
    with attention.swap(transformer, block_size=20, anchor_stride=7):
        hook = transformer.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(transformer)
        hook.remove()
        with pytest.raises(RuntimeError, match="outside its transformer's forward pass"):
            transformer.blocks[0].attn1(torch.zeros(1, TOKENS, 64))
    assert torch.equal(run(transformer), dense)


def test_compiled_blocks_have_no_graph_break(transformer: Any) -> None:
    expected = run_masked(transformer, attention.AnchorLocalPattern(20, 7))
    model = copy.deepcopy(transformer)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    with attention.swap(model, block_size=20, anchor_stride=7, dense_layers=[2]) as handle:
        run(model)
        handle.set_dense("dense_steps")
        run(model)
    with attention.swap(model, block_size=20, anchor_stride=7) as handle:
        torch.testing.assert_close(run(model), expected, rtol=1e-5, atol=1e-5)
    assert handle.report().sparse_calls == LAYERS


def test_pipeline_as_target_swaps_its_transformers(transformer: Any) -> None:
    second = copy.deepcopy(transformer)
    pipe = WanPipeline(None, None, None, None, transformer=transformer, transformer_2=second)
    with attention.swap(pipe, block_size=20, anchor_stride=7) as handle:
        run(transformer)
        run(second)
    assert handle.report().sparse_calls == 2 * LAYERS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"backend": "flashy"},
            "unknown attention backend 'flashy'; known: anchor_local, block_topk, dense, window",
        ),
        ({"block_size": 4}, "anchor_local needs block_size and anchor_stride"),
        ({"block_size": 4, "anchor_stride": 0}, "anchor_stride must be at least 1, got 0"),
        ({"backend": "dense", "block_size": 4}, "backend dense takes no block_size"),
        ({"backend": "dense", "dense_layers": [1]}, "backend dense takes no dense_layers"),
        ({"block_size": 4, "anchor_stride": 2, "window": 1}, "backend anchor_local takes no window"),
        (
            {"block_size": 4, "anchor_stride": 2, "dense_layers": [3]},
            r"names \[3\], but there are layers 0 .. 2",
        ),
        ({"block_size": 4, "anchor_stride": 2, "impl": "reference"}, "cannot be swapped in"),
    ],
)
def test_settings_out_of_range_are_named(transformer: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention.swap(transformer, **arguments)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in transformer.modules())


def test_backends_are_those_of_the_settings() -> None:
    assert set(BACKENDS) == set(get_args(AttentionBackend))


def test_unsupported_models_are_refused_by_name(tmp_path: Path) -> None:
    known = r"cannot swap attention in Linear; supported: CogVideoX.*, WanTransformer3DModel"
    with pytest.raises(ValueError, match=known):
        attention.swap(torch.nn.Linear(1, 1), block_size=4, anchor_stride=2)
    with pytest.raises(ValueError, match="PosixPath is no transformer and holds none"):
        attention.swap(tmp_path, block_size=4, anchor_stride=2)


def test_a_second_swap_is_refused(transformer: Any) -> None:
    with (
        attention.swap(transformer, block_size=20, anchor_stride=7) as handle,
        pytest.raises(ValueError, match="swapped already"),
    ):
        attention.swap(transformer, block_size=10, anchor_stride=3)
    assert handle.report().sparse_calls == 0
    assert not any(m._forward_hooks for m in transformer.modules())
