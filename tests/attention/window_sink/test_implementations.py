"""PyTorch and Triton implementations against the definition in float64."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.window_sink.sinks import SinkMode, Sinks
from attention.window_sink.triton_impl import TileConfig, window_sink_triton
from attention.window_sink.window import Bounds
from tests.attention.window_sink.helpers import (
    CASES,
    DEVICE,
    Case,
    Inputs,
    budget,
    exact,
    inputs,
    relative_error,
    run,
)

FAST = ("torch", "triton")
MODES: tuple[SinkMode | None, ...] = (None, "null_logit", "key0_bias")
BF16_LIMIT = 1e-2
OTHER_MODE_FACTOR = 10
MODERATE = Case((70, 0, 37), (20, 11), heads=2, kv_heads=1)


DTYPES = (torch.float32, torch.bfloat16)
# Interpreting a kernel takes a second: there each case has one mode in each dtype, its neighbours the others.
CALLS = [
    *(("torch", dtype, case.with_sinks(mode)) for case in CASES for mode in MODES for dtype in DTYPES),
    *(
        ("triton", dtype, case.with_sinks(MODES[(i + j) % 3]))
        for i, case in enumerate(CASES)
        for j, dtype in enumerate(DTYPES)
    ),
]


@pytest.mark.parametrize(("impl", "dtype", "case"), CALLS, ids=str)
def test_equals_the_definition(impl: str, dtype: torch.dtype, case: Case) -> None:
    x = inputs(case, dtype, DEVICE)
    truth = exact(case, x)
    out = run(case, x, impl)
    assert out.dtype == dtype
    assert out.shape == x.q.shape
    error = relative_error(out, truth)
    assert error <= budget(case, x, truth)
    assert error < BF16_LIMIT


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_half_precision(impl: str) -> None:
    case = MODERATE.with_sinks("key0_bias")
    x = inputs(case, torch.float16, DEVICE)
    truth = exact(case, x)
    assert relative_error(run(case, x, impl), truth) <= budget(case, x, truth)


side = st.none() | st.integers(0, 90)
cases = st.builds(
    Case,
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5).map(tuple).filter(any),
    window=st.tuples(side, side),
    causal=st.booleans(),
    kv_heads=st.sampled_from((1, 2)),
    head_dim=st.sampled_from((8, 16)),
    sink_mode=st.sampled_from(MODES),
    unit=st.sampled_from((1, 1, 7, 16, 50)),
    global_keys=st.sampled_from((0, 0, 1, 20, 80)),
    global_queries=st.sampled_from((0, 0, 1, 20, 80)),
)


@settings(max_examples=60)
@given(cases)
def test_torch_in_float64_is_the_definition(case: Case) -> None:
    x = inputs(case, torch.float64)
    torch.testing.assert_close(run(case, x, "torch"), exact(case, x), rtol=1e-12, atol=1e-12)


@settings(max_examples=15)
@given(cases)
def test_triton_in_float32_is_the_definition(case: Case) -> None:
    x = inputs(case, torch.float32, DEVICE)
    truth = exact(case, x)
    assert relative_error(run(case, x, "triton"), truth) <= budget(case, x, truth)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "tiles",
    [TileConfig(16, 64, 4, 2), TileConfig(64, 16, 4, 2, fewest_inner=1), TileConfig(128, 16, 4, 2)],
)
def test_any_tiles_write_every_element(tiles: TileConfig, mode: SinkMode | None) -> None:
    """Outputs start as NaN; tiles of other shapes meet the edges of windows elsewhere."""
    plain = Case((150, 0, 17, 64), (60, 47), sink_mode=mode)
    x = inputs(plain, torch.float32, DEVICE)
    sinks = None if mode is None else Sinks(x.sinks, mode)
    for case in (plain, replace(plain, window=(1, 0), unit=30, global_keys=20, global_queries=9)):
        truth = exact(case, x)
        out = torch.full_like(x.q, float("nan"))
        window_sink_triton(x.q, x.k, x.v, x.cu_seqlens, case.seen, case.head_dim**-0.5, sinks, tiles, out)
        assert relative_error(out, truth) <= budget(case, x, truth)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("mode", ["null_logit", "key0_bias"])
def test_the_modes_are_two_functions(mode: SinkMode, impl: str) -> None:
    """Running a model with the other mode is an error of another order than rounding."""
    other: SinkMode = "key0_bias" if mode == "null_logit" else "null_logit"
    case = Case((100,), (64, 64), heads=4, kv_heads=2, head_dim=64, sink_mode=mode)
    x = inputs(case, torch.bfloat16, DEVICE)
    truth = exact(case, x)
    own = relative_error(run(case, x, impl), truth)
    assert relative_error(run(case, x, impl, sink_mode=other), truth) > OTHER_MODE_FACTOR * own


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_a_biased_key_is_felt_only_where_it_is_seen(impl: str) -> None:
    case = Case((60, 50), (10, 4), heads=4)
    x = inputs(case, torch.float32, DEVICE)
    plain, biased = run(case, x, impl), run(case.with_sinks("key0_bias"), x, impl)
    change = (plain - biased).abs().amax((1, 2)).cpu()
    sees_key_0 = torch.cat([torch.arange(60), torch.arange(50)]) <= 10
    assert change[~sees_key_0].max() < 1e-5
    assert change[sees_key_0].min() > 1e-2


# NumPy, which interprets kernels, warns of the neighbours' own results.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("mode", MODES)
def test_sequences_do_not_see_each_other(mode: SinkMode | None, impl: str) -> None:
    """Not even as keys of weight zero: the neighbours are NaN."""
    case = Case((40, 33, 50), (64, 64), sink_mode=mode)
    x = inputs(case, torch.float32, DEVICE)
    middle = slice(40, 73)
    alone = Case((33,), (64, 64), sink_mode=mode)
    truth = exact(
        alone, Inputs(x.q[middle], x.k[middle], x.v[middle], x.cu_seqlens.new_tensor([0, 33]), x.sinks)
    )
    for part in (x.q, x.k, x.v):
        part[:40] = float("nan")
        part[73:] = float("nan")
    assert relative_error(run(case, x, impl)[middle], truth) < 1e-6


# As above: rows that do see the NaN keys.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("impl", FAST)
def test_tiles_outside_the_window_are_never_visited(impl: str) -> None:
    """NaN keys there would reach a row even with weight zero."""
    case = Case((400,), (20, 20), heads=1, kv_heads=1)
    x = inputs(case, torch.float32, DEVICE)
    truth = exact(case, x)
    for part in (x.k, x.v):
        part[:100] = float("nan")
        part[300:] = float("nan")
    within = slice(192, 208)  # of tiles and bands that reach no further than 64 rows and the window
    assert relative_error(run(case, x, impl)[within], truth[within]) < 1e-6


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("impl", FAST)
def test_only_the_globals_and_the_window_are_visited(impl: str) -> None:
    """Keys between them, and behind the window, are NaN."""
    case = Case((800,), (1, 1), heads=1, kv_heads=1, unit=100, global_keys=64, sink_mode="null_logit")
    x = inputs(case, torch.float32, DEVICE)
    truth = exact(case, x)
    for part in (x.k, x.v):
        part[64:300] = float("nan")
        part[600:] = float("nan")
    within = slice(448, 480)  # a tile within unit 4, which sees units 3 to 5
    assert relative_error(run(case, x, impl)[within], truth[within]) < 1e-6


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("mode", ["null_logit", "key0_bias"])
def test_sinks_are_felt_by_all_that_see_key_0_as_a_global(mode: SinkMode, impl: str) -> None:
    case = Case((90,), (4, 4), global_keys=1)
    x = inputs(case, torch.float32, DEVICE)
    change = (run(case, x, impl) - run(case.with_sinks(mode), x, impl)).abs().amax((1, 2))
    assert change.min() > 1e-3


@pytest.mark.parametrize("impl", FAST)
def test_a_unit_or_window_of_everything_is_the_plain_full_window(impl: str) -> None:
    full = Case((150, 40), (None, None))
    x = inputs(full, torch.float32, DEVICE)
    truth = exact(full, x)
    for case in (
        Case((150, 40), (0, 0), unit=150),
        Case((150, 40), (3, 3), unit=40),
        Case((150, 40), (0, 0), global_keys=150),
        Case((150, 40), (0, 0), global_queries=150),
    ):
        assert relative_error(run(case, x, impl), truth) <= budget(full, x, truth)


@pytest.mark.parametrize("impl", FAST)
def test_strided_inputs(impl: str) -> None:
    """Views of a fused projection, transposed heads, and a last dimension that is not dense."""
    case = Case((100,), (20, 11), sink_mode="key0_bias", head_dim=20)
    x = inputs(case, torch.float32, DEVICE)
    truth = exact(case, x)
    fused = torch.stack([x.q, x.k, x.v], dim=1).unbind(1)
    transposed = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in (x.q, x.k, x.v)]
    sparse_last = [torch.stack([part, part], dim=-1)[..., 0] for part in (x.q, x.k, x.v)]
    bounds = torch.stack([x.cu_seqlens, x.cu_seqlens], dim=-1)[..., 0]
    for views in (fused, transposed, sparse_last):
        assert not any(part.is_contiguous() for part in views)
        q, k, v = views
        out = run(case, Inputs(q, k, v, bounds, x.sinks), impl)
        assert relative_error(out, truth) <= budget(case, x, truth)


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["null_logit", "key0_bias"])
def test_shards_of_heads_are_those_heads_of_the_whole(mode: SinkMode, ranks: int, impl: str) -> None:
    case = Case((40, 9), (16, 16), heads=4, kv_heads=4, sink_mode=mode)
    x = inputs(case, torch.float32, DEVICE)
    whole = run(case, x, impl)
    parts = zip(*(part.chunk(ranks, 1) for part in (x.q, x.k, x.v)), x.sinks.chunk(ranks), strict=True)
    shards = [run(case, Inputs(q, k, v, x.cu_seqlens, sinks), impl) for q, k, v, sinks in parts]
    assert relative_error(torch.cat(shards, 1), whole.double()) < 1e-6


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_scale_is_of_scores_and_not_of_sinks(impl: str) -> None:
    case = MODERATE.with_sinks("null_logit")
    x = inputs(case, torch.float32, DEVICE)
    halved = replace(x, q=x.q / 2)
    truth = exact(case, halved)
    out = run(case, x, impl, scale=case.head_dim**-0.5 / 2)
    assert relative_error(out, truth) <= budget(case, halved, truth)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sink", [-3e38, -1e4, 1e4, 3e38])
def test_large_scores_and_sinks_do_not_overflow(sink: float, mode: SinkMode | None, impl: str) -> None:
    case = MODERATE.with_sinks(mode)
    x = inputs(case, torch.float32, DEVICE)
    x = Inputs(x.q * 100, x.k * 100, x.v, x.cu_seqlens, torch.full_like(x.sinks, sink))
    truth, out = exact(case, x), run(case, x, impl)
    if mode == "null_logit" and sink > 1e6:  # it takes all of the weight
        assert bool((truth == 0).all())
        assert bool((out == 0).all())
    else:
        assert relative_error(out, truth) <= budget(case, x, truth)


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("sequences", [0, 3])
def test_no_tokens_at_all(sequences: int, impl: str) -> None:
    case = Case((0,) * sequences, (4, 4))
    x = inputs(case, torch.float32, DEVICE)
    assert run(case, x, impl).shape == (0, 2, 32)


@pytest.mark.parametrize("impl", FAST)
def test_bounds_may_be_int64(impl: str) -> None:
    x = inputs(MODERATE, torch.float32, DEVICE)
    wide = replace(x, cu_seqlens=x.cu_seqlens.long())
    assert torch.equal(run(MODERATE, x, impl), run(MODERATE, wide, impl))


def test_bands_are_small_beside_tokens_squared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest scores that the PyTorch implementation asks for grow with the window, not with tokens."""
    from attention.window_sink import torch_impl

    sizes: list[int] = []
    inner = torch_impl._seen

    def spy(queries: torch.Tensor, keys: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        seen = inner(queries, keys, bounds)
        sizes.append(seen.numel())
        return seen

    monkeypatch.setattr(torch_impl, "_seen", spy)
    case = Case((20_000,), (64, 64), heads=1, kv_heads=1, head_dim=8)
    run(case, inputs(case, torch.float32), "torch")
    assert max(sizes) <= 128 * 256
    assert sum(sizes) <= 20_000 * 257
