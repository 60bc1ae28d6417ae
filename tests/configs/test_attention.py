import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.window_sink.window import Window
from configs.attention import MAX_BOXES, AttentionConfig, AttentionOverrides, WindowUnit, auto_tile
from configs.job import AttentionReport


@given(st.integers(1, 200), st.integers(1, 200))
def test_auto_values_are_whole_frames_and_a_stride_that_visits_every_column(rows: int, columns: int) -> None:
    resolved = AttentionConfig().resolved((21, rows, columns))
    assert resolved.block_size == 2 * rows * columns
    assert isinstance(resolved.anchor_stride, int)
    assert resolved.anchor_stride >= 16
    assert math.gcd(resolved.anchor_stride, rows * columns) == 1
    visited = {
        token % columns for token in range(0, resolved.anchor_stride * columns, resolved.anchor_stride)
    }
    assert visited == set(range(columns))


def test_given_values_are_kept() -> None:
    config = AttentionConfig(block_size=100, anchor_stride=4, anchor_offset=3)
    assert config.resolved((21, 30, 52)) == config
    assert AttentionConfig(backend="dense").resolved((21, 30, 52)).block_size == "auto"


@pytest.mark.parametrize(
    ("frames", "unit", "window"),
    [(9, "frames", 1), (21, "frames", 2), (31, "frames", 3), (1, "frames", 1), (21, "tokens", 2 * 1560)],
)
def test_an_auto_window_is_an_eighth_of_the_clip(frames: int, unit: WindowUnit, window: int) -> None:
    resolved = AttentionConfig(backend="window", window_unit=unit).resolved((frames, 30, 52))
    assert (resolved.window, resolved.window_unit, resolved.global_frames) == (window, unit, 1)
    # The settings of the other backend stay as they were said.
    assert (resolved.block_size, resolved.anchor_stride) == ("auto", "auto")
    assert AttentionConfig().resolved((frames, 30, 52)).window == "auto"


@pytest.mark.parametrize("frames", [13, 21, 31, 33, 61])
def test_an_auto_window_is_careful(frames: int) -> None:
    window = AttentionConfig(backend="window").resolved((frames, 1, 1)).window
    assert window != "auto"
    pairs = Window(window, window, global_keys=1).allowed_pairs(frames)
    assert 0.2 < pairs / frames**2 < 0.4


@pytest.mark.parametrize(
    ("dense_steps", "steps", "count"),
    [(0, 10, 0), (0.2, 10, 2), (0.2, 11, 3), (0.01, 10, 1), (3, 10, 3), (30, 10, 10), (1, 10, 1)],
)
def test_dense_steps_below_one_are_a_share_else_a_count(dense_steps: float, steps: int, count: int) -> None:
    assert AttentionConfig(dense_steps=dense_steps).dense_step_count(steps) == count


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dense_steps": 1.5}, "neither a fraction below 1 nor a whole number"),
        ({"anchor_stride": 4, "anchor_offset": 4}, "anchor_offset=4 must be below anchor_stride=4"),
        ({"block_size": 0}, "block_size"),
        ({"backend": "flash"}, "anchor_local"),
        ({"window": -1}, "window"),
        ({"window_unit": "rows"}, "frames"),
        ({"global_frames": -1}, "global_frames"),
        ({"block": 4}, "block"),
    ],
)
def test_invalid_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionConfig.model_validate(values)


def test_an_offset_is_checked_against_the_resolved_stride() -> None:
    with pytest.raises(ValueError, match="anchor_offset=40 must be below anchor_stride=17"):
        AttentionConfig(anchor_offset=40).resolved((9, 16, 16))


def test_overrides_lie_over_the_base() -> None:
    base = AttentionConfig(block_size=64, dense_steps=2)
    assert AttentionOverrides().over(base) == base
    merged = AttentionOverrides(anchor_stride=4, dense_steps=0).over(base)
    assert (merged.block_size, merged.anchor_stride, merged.dense_steps) == (64, 4, 0)
    with pytest.raises(ValueError, match="block_size has no effect with backend=dense"):
        AttentionOverrides(backend="dense", block_size=4).over(base)
    with pytest.raises(ValueError, match="anchor_stride has no effect with backend=dense"):
        AttentionOverrides(anchor_stride=4).over(AttentionConfig(backend="dense"))


def test_settings_of_another_backend_have_no_effect_and_are_refused() -> None:
    window = AttentionConfig(backend="window")
    for said, base, message in (
        ({"anchor_stride": 4}, window, "anchor_stride has no effect with backend=window; leave it out"),
        ({"window": 2}, AttentionConfig(), "window has no effect with backend=anchor_local"),
        (
            {"backend": "window", "block_size": 4},
            AttentionConfig(),
            "block_size has no effect with backend=w",
        ),
        ({"backend": "dense", "global_frames": 1}, window, "global_frames has no effect with backend=dense"),
    ):
        with pytest.raises(ValueError, match=message):
            AttentionOverrides.model_validate(said).over(base)
    merged = AttentionOverrides(backend="window", window=2).over(
        AttentionConfig(anchor_stride=9, dense_steps=2)
    )
    assert (merged.backend, merged.window, merged.dense_steps) == ("window", 2, 2)
    assert AttentionOverrides(backend="anchor_local").over(merged).anchor_stride == 9


def test_boxes_are_resolved_and_start_from_their_own_defaults() -> None:
    base = AttentionConfig(block_size=64, anchor_stride=9, dense_steps=2)
    boxes = AttentionOverrides(backend="block_topk").over(base)
    assert (boxes.block_size, boxes.anchor_stride, boxes.dense_steps) == ("auto", "auto", 2)
    window = AttentionOverrides(backend="window").over(base)  # keeps what it does not use
    assert AttentionOverrides(backend="block_topk").over(window) == boxes
    resolved = boxes.resolved((21, 30, 52))
    assert (resolved.tile_thw, resolved.anchor_stride, resolved.top_k) == ((7, 8, 9), "none", 0.2)
    assert resolved.resolved((21, 30, 52)) == resolved
    assert resolved.boxes == ((7, 8, 9), None, None, 0)
    runs = AttentionOverrides(block_size=128, anchor_stride=7, anchor_offset=2, top_k=3).over(boxes)
    assert runs.resolved((21, 30, 52)).boxes == (None, 128, 7, 2)
    back = AttentionOverrides(backend="anchor_local").over(resolved)
    assert (back.tile_thw, back.anchor_stride, back.block_size) == ("auto", "auto", "auto")
    with pytest.raises(ValueError, match="resolved"):
        _ = boxes.boxes


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"top_k": 1.5}, "top_k=1.5 is neither a share of the boxes below 1 nor a whole number"),
        ({"top_k": 0}, "top_k"),
        (
            {"block_size": 64, "tile_thw": (1, 2, 2)},
            "boxes of block_size=64 tokens in raster order or of tile_thw",
        ),
        ({"anchor_offset": 1}, "anchor_offset=1 has no effect without an anchor_stride"),
        ({"anchor_stride": 1025}, "anchor_stride=1025 must be at most 1024 with tile_thw"),
        ({"anchor_stride": 4, "anchor_offset": 4}, "anchor_offset=4 must be below anchor_stride=4"),
        ({"token_order": "tile"}, "token_order has no effect with backend=block_topk"),
        ({"backend": "anchor_local", "top_k": 2}, "top_k has no effect with backend=anchor_local"),
        ({"backend": "anchor_local", "anchor_stride": "none"}, "anchor_local needs anchors"),
        (
            {"tile_thw": (1, 1, 1)},
            r"tile_thw=\(1, 1, 1\) cuts .* 21 x 30 x 52 tokens into 32760 boxes; at most 2048",
        ),
        ({"block_size": 8}, "block_size=8 cuts a clip"),
    ],
)
def test_boxes_that_cannot_be_are_named(said: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionOverrides.model_validate({"backend": "block_topk"} | said).over(AttentionConfig()).resolved(
            (21, 30, 52)
        )


@given(st.tuples(*[st.integers(1, 300)] * 3))
def test_auto_boxes_are_never_too_many(grid: tuple[int, int, int]) -> None:
    tile, *_ = AttentionConfig(backend="block_topk").resolved(grid).boxes
    assert tile is not None
    assert math.prod(-(-side // of_box) for side, of_box in zip(grid, tile, strict=True)) <= MAX_BOXES


def test_settings_of_jobs_from_before_there_were_windows_still_parse() -> None:
    old = {"backend": "anchor_local", "block_size": 32, "anchor_stride": 17, "anchor_offset": 0}
    config = AttentionConfig.model_validate(old | {"dense_steps": 0.2, "dense_layers": [], "min_tokens": 0})
    assert (config.block_size, config.window) == (32, "auto")
    report = AttentionReport.model_validate(
        old | {"implementation": "torch", "tokens": 48, "density": 0.5, "sparse_calls": 1, "dense_calls": 0}
    )
    assert (report.block_size, report.window, report.sink_mode) == (32, None, None)


def test_blocks_in_frames_and_tiles_are_resolved_to_tokens() -> None:
    frames = AttentionConfig(block_size=3, block_unit="frames", anchor_stride=5).resolved((21, 30, 52))
    assert (frames.block_size, frames.block_unit) == (3 * 1560, "tokens")
    assert frames.resolved((21, 30, 52)) == frames
    assert AttentionConfig(block_unit="frames").resolved((21, 30, 52)).block_size == 2 * 1560
    tiles = AttentionConfig(token_order="tile").resolved((21, 30, 52))
    assert (tiles.tile_thw, tiles.anchor_stride, tiles.block_size) == ((11, 15, 18), 16, "auto")
    assert tiles.resolved((21, 30, 52)) == tiles


@given(st.tuples(*[st.integers(1, 90)] * 3), st.integers(1, 8000))
def test_an_auto_tile_is_no_larger_than_asked_and_cuts_evenly(grid: tuple[int, int, int], most: int) -> None:
    tile = auto_tile(grid, most)
    assert math.prod(tile) <= most
    for side, whole in zip(tile, grid, strict=True):
        assert 1 <= side <= whole
        assert side == -(-whole // -(-whole // side))  # no smaller side needs as few boxes


def test_settings_of_the_other_token_order_have_no_effect_and_are_refused() -> None:
    for said, message in (
        ({"token_order": "tile", "block_size": 4}, "block_size has no effect with token_order=tile"),
        ({"tile_thw": (1, 2, 2)}, "tile_thw has no effect with token_order=raster; leave it out"),
        ({"token_order": "tile", "anchor_stride": 1025}, "anchor_stride=1025 must be at most 1024"),
        ({"block_unit": "frames"}, "block_unit says what block_size counts; give both"),
        ({"token_order": "tile", "tile_thw": (0, 1, 1)}, "tile_thw"),
    ):
        with pytest.raises(ValueError, match=message):
            AttentionOverrides.model_validate(said).over(AttentionConfig(block_size=64))
    merged = AttentionOverrides(token_order="tile", tile_thw=(1, 2, 3)).over(AttentionConfig(block_size=64))
    assert (merged.token_order, merged.tile_thw, merged.block_size) == ("tile", (1, 2, 3), 64)


def test_precision_is_a_setting_of_anchor_local() -> None:
    said = AttentionOverrides(precision="fp8")
    assert said.over(AttentionConfig()).precision == "fp8"
    for backend in ("window", "block_topk", "dense"):
        with pytest.raises(ValueError, match=f"precision has no effect with backend={backend}"):
            AttentionOverrides(backend=backend, precision="fp8").over(AttentionConfig())
    with pytest.raises(ValueError, match="precision"):
        AttentionOverrides.model_validate({"precision": "bf16"})
