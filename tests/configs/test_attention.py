import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.attention import AttentionConfig, AttentionOverrides


@given(st.integers(1, 200), st.integers(1, 200))
def test_auto_values_are_whole_frames_and_a_stride_that_visits_every_column(rows: int, columns: int) -> None:
    resolved = AttentionConfig().resolved((rows, columns))
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
    assert config.resolved((30, 52)) == config
    assert AttentionConfig(backend="dense").resolved((30, 52)).block_size == "auto"


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
        ({"block": 4}, "block"),
    ],
)
def test_invalid_values_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionConfig.model_validate(values)


def test_an_offset_is_checked_against_the_resolved_stride() -> None:
    with pytest.raises(ValueError, match="anchor_offset=40 must be below anchor_stride=17"):
        AttentionConfig(anchor_offset=40).resolved((16, 16))


def test_overrides_lie_over_the_base() -> None:
    base = AttentionConfig(block_size=64, dense_steps=2)
    assert AttentionOverrides().over(base) == base
    merged = AttentionOverrides(anchor_stride=4, dense_steps=0).over(base)
    assert (merged.block_size, merged.anchor_stride, merged.dense_steps) == (64, 4, 0)
    with pytest.raises(ValueError, match="block_size has no effect with backend=dense"):
        AttentionOverrides(backend="dense", block_size=4).over(base)
    with pytest.raises(ValueError, match="anchor_stride has no effect with backend=dense"):
        AttentionOverrides(anchor_stride=4).over(AttentionConfig(backend="dense"))
