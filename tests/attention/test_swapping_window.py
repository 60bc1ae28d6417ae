"""The backend ``window`` in a real (tiny) Wan transformer, against the mask on every layer."""

import copy
from collections.abc import Iterator
from typing import Any

import diffusers.models.transformers.transformer_wan as transformer_wan
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attention
from attention.window_sink.reference import allowed
from attention.window_sink.sinks import SinkMode
from attention.window_sink.window import Window
from tests.attention import tiny_transformer
from tests.attention.tiny_transformer import GRID, HEADS, LAYERS, TEXT_TOKENS, TOKENS, Grid, run, run_masked

FRAME = 35
GRID_5: Grid = (5, 2, 3)


@pytest.fixture(scope="module")
def transformer() -> Any:
    return tiny_transformer.tiny_transformer()


@pytest.fixture(scope="module")
def exact_transformer(transformer: Any) -> Any:
    """The same model in float64."""
    return copy.deepcopy(transformer).double()


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def mask_of(window: Window, grid: Grid = GRID) -> Tensor:
    positions = torch.arange(grid[0] * grid[1] * grid[2])
    return allowed(window, positions, positions)


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
@pytest.mark.parametrize(
    ("setting", "window"),
    [
        ({"window": 0, "global_frames": 1}, Window(0, 0, unit=FRAME, global_keys=FRAME)),
        ({"window": (1, 0)}, Window(1, 0, unit=FRAME)),
        ({"window": 11, "window_unit": "tokens", "global_frames": 1}, Window(11, 11, global_keys=FRAME)),
        ({"window": (None, 3), "window_unit": "tokens"}, Window(None, 3)),
    ],
)
def test_swapped_model_equals_masked_model(
    transformer: Any, setting: dict[str, Any], window: Window, impl: Any
) -> None:
    mask = mask_of(window)
    expected, dense = run_masked(transformer, mask), run(transformer)
    with attention.swap(transformer, "window", impl=impl, **setting) as handle:
        out = run(transformer)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert (out - dense).abs().max() > 1e-4  # else this test could not tell sparse from dense
    report = handle.report()
    assert (report.implementation, report.sparse_calls, report.dense_calls) == (impl, LAYERS, 0)
    assert report.density == int(mask.sum()) / TOKENS**2
    asked = setting["window"]
    assert report.window == (asked if isinstance(asked, tuple) else (asked, asked))
    assert report.window_unit == setting.get("window_unit", "frames")
    assert report.global_frames == setting.get("global_frames", 0)
    assert (report.block_size, report.sink_mode) == (None, None)


side = st.none() | st.integers(0, 6)


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 5), side, side, st.integers(0, 6), st.booleans())
def test_any_grid_and_window_equals_the_mask(
    exact_transformer: Any,
    frames: int,
    rows: int,
    columns: int,
    left: int | None,
    right: int | None,
    global_frames: int,
    in_frames: bool,
) -> None:
    grid, frame = (frames, rows, columns), rows * columns
    if frames * frame == TEXT_TOKENS:
        return  # run_masked tells cross-attention by its length
    backend = attention.WindowBackend((left, right), "frames" if in_frames else "tokens", global_frames)
    with attention.swap(exact_transformer, backend) as handle:
        out = run(exact_transformer, grid=grid)
    mask = mask_of(Window(left, right, frame if in_frames else 1, global_frames * frame), grid)
    torch.testing.assert_close(out, run_masked(exact_transformer, mask, grid), rtol=1e-12, atol=1e-12)
    assert handle.report().density == int(mask.sum()) / mask.numel()


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(
    "setting",
    [{"window": 2}, {"window": (None, None)}, {"window": 0, "global_frames": 3}, {"window": 10_000}],
)
def test_a_window_of_all_frames_is_the_dense_model(
    transformer: Any, setting: dict[str, Any], impl: Any
) -> None:
    with attention.swap(transformer, "window", impl=impl, **setting) as handle:
        out = run(transformer)
    torch.testing.assert_close(out, run(transformer), rtol=1e-5, atol=1e-5)
    assert handle.report().density == 1.0
    assert handle.report().sparse_calls == LAYERS


def test_one_timestep_for_each_token_stays_with_its_token(transformer: Any) -> None:
    timestep = torch.randint(0, 1000, (2, TOKENS), generator=torch.Generator().manual_seed(1)).float()
    with attention.swap(transformer, "window", window=2):
        out = run(transformer, timestep)
    torch.testing.assert_close(out, run(transformer, timestep), rtol=1e-5, atol=1e-5)


def test_dense_calls_are_counted_by_reason(transformer: Any) -> None:
    dense = run(transformer)
    with attention.swap(transformer, "window", window=0, dense_layers=[1]) as handle:
        handle.set_dense("dense_steps")
        assert torch.equal(run(transformer), dense)
        handle.set_dense(None)
        run(transformer)
    assert handle.report().dense_reasons == {"dense_steps": LAYERS, "dense_layers": 1}
    with attention.swap(transformer, "window", window=0, min_tokens=TOKENS + 1) as handle:
        assert torch.equal(run(transformer), dense)
    assert handle.report().dense_reasons == {"min_tokens": LAYERS}


def test_removal_is_exact_and_cross_attention_is_never_touched(
    transformer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(transformer)
    processors = [module.processor for module in transformer.modules() if hasattr(module, "processor")]
    state = [copy.copy(vars(processor)) for processor in processors]
    backends: list[tuple[int, object]] = []
    dispatch = transformer_wan.dispatch_attention_fn

    def spy(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Any:
        backends.append((key.shape[1], kwargs["backend"]))
        return dispatch(query, key, value, **kwargs)

    monkeypatch.setattr(transformer_wan, "dispatch_attention_fn", spy)
    with attention.swap(transformer, "window", window=0):
        run(transformer)
    assert {length for length, backend in backends if backend is None} == {TEXT_TOKENS}
    assert {length for length, backend in backends if backend is not None} == {TOKENS}
    after = [module.processor for module in transformer.modules() if hasattr(module, "processor")]
    assert all(a is b for a, b in zip(processors, after, strict=True))
    assert state == [vars(processor) for processor in after]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in transformer.modules())
    assert torch.equal(run(transformer), before)


def test_a_lora_in_self_attention_still_works(transformer: Any) -> None:
    model = copy.deepcopy(transformer)
    config = LoraConfig(r=2, target_modules=["attn1.to_q", "attn1.to_v"], init_lora_weights=False)
    torch.manual_seed(0)
    model.add_adapter(config)
    mask = mask_of(Window(0, 0, unit=FRAME))
    expected = run_masked(model, mask)
    assert (expected - run_masked(transformer, mask)).abs().max() > 1e-3
    with attention.swap(model, "window", window=0):
        torch.testing.assert_close(run(model), expected, rtol=1e-5, atol=1e-5)


def test_compiled_blocks_have_no_graph_break(transformer: Any) -> None:
    model = copy.deepcopy(transformer)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    with attention.swap(model, "window", window=0, global_frames=1) as handle:
        out = run(model)
    expected = run_masked(transformer, mask_of(Window(0, 0, FRAME, FRAME)))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert handle.report().sparse_calls == LAYERS


def run_with_sinks(model: Any, sinks: Tensor, mode: SinkMode, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """A window of one frame and the first one, by a mask and one more column of scores."""
    layer = iter(range(LAYERS))
    mask = mask_of(Window(0, 0, FRAME, FRAME))

    def attend(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if key.shape[1] == TEXT_TOKENS:
            return scaled_dot_product_attention(q, k, v).transpose(1, 2)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        logits = sinks[next(layer)].to(scores.dtype)[:, None, None]
        if mode == "key0_bias":
            scores[..., :1] += logits
        scores = scores.masked_fill(~mask, float("-inf"))
        scores = torch.cat([scores, logits.expand(2, -1, TOKENS, 1)], -1)
        weights = (scores if mode == "null_logit" else scores[..., :-1]).softmax(-1)
        return (weights[..., :TOKENS] @ v).transpose(1, 2)

    with monkeypatch.context() as patch:
        patch.setattr(transformer_wan, "dispatch_attention_fn", attend)
        return run(model)


@pytest.mark.parametrize("mode", ["null_logit", "key0_bias"])
@pytest.mark.parametrize("per_layer", [False, True])
def test_trained_sinks_are_used(
    exact_transformer: Any, per_layer: bool, mode: SinkMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_sinks = 2 + torch.randn(LAYERS, HEADS, generator=torch.Generator().manual_seed(0))
    sinks = all_sinks if per_layer else all_sinks[1]
    expected = run_with_sinks(exact_transformer, sinks.expand(LAYERS, HEADS), mode, monkeypatch)
    with attention.swap(
        exact_transformer, "window", window=0, global_frames=1, sinks=sinks, sink_mode=mode
    ) as handle:
        out = run(exact_transformer)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert handle.report().sink_mode == mode


def test_sinks_that_would_not_be_used_are_an_error(transformer: Any) -> None:
    sinks: dict[str, Any] = {"sinks": torch.zeros(HEADS), "sink_mode": "null_logit"}
    dense: dict[str, Any]
    for dense in ({"dense_layers": [1]}, {"min_tokens": 5}):
        with pytest.raises(ValueError, match="no call may run dense, since the sinks would not be used"):
            attention.swap(transformer, "window", window=0, **sinks, **dense)
    with (
        attention.swap(transformer, "window", window=0, **sinks) as handle,
        pytest.raises(ValueError, match="dense_steps: no call may run dense"),
    ):
        handle.set_dense("dense_steps")
    with pytest.raises(ValueError, match="backend anchor_local takes no sinks, sink_mode"):
        attention.swap(transformer, block_size=4, anchor_stride=2, **sinks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "backend window needs window"),
        ({"window": -1}, "window left must be None .unbounded. or an integer >= 0, got -1"),
        ({"window": (1, 2, 3)}, r"window must be a pair \(left, right\), got \(1, 2, 3\)"),
        ({"window": 1, "window_unit": "rows"}, "window_unit must be one of frames, tokens, got 'rows'"),
        ({"window": 1, "global_frames": -1}, "global_frames must be an integer >= 0, got -1"),
        ({"window": 1, "block_size": 4, "anchor_offset": 0}, "takes no block_size, anchor_offset"),
        ({"window": 1, "dense_layers": [3]}, r"names \[3\], but there are layers 0 .. 2"),
        ({"window": 1, "sinks": torch.zeros(2)}, "sinks need a sink_mode"),
        ({"window": 1, "sink_mode": "null_logit"}, "'null_logit' was given without sinks"),
        (
            {"window": 1, "sinks": torch.zeros(2, 2), "sink_mode": "null_logit"},
            r"sinks must have shape \(3, 2\), got \(2, 2\)",
        ),
        (
            {"window": 1, "sinks": torch.zeros(()), "sink_mode": "null_logit"},
            r"sinks must be \[heads\] or \[layers, heads\], got \(\)",
        ),
        ({"window": 1, "impl": "flash"}, "impl must be one of auto, reference, torch, triton, got 'flash'"),
    ],
)
def test_settings_out_of_range_are_named(transformer: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention.swap(transformer, "window", **arguments)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in transformer.modules())


def test_a_made_backend_has_its_settings_already(transformer: Any) -> None:
    backend = attention.WindowBackend((1, 1))
    with pytest.raises(ValueError, match="the window backend has its settings already"):
        attention.swap(transformer, backend, global_frames=1)
