from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.window_sink.reference import allowed
from attention.window_sink.window import Window

side = st.none() | st.integers(0, 50)
windows = st.builds(
    Window, side, side, st.integers(1, 15), st.integers(0, 50), st.integers(0, 50), causal=st.booleans()
)


@given(windows, st.integers(0, 40))
def test_counted_pairs_are_those_of_the_mask(window: Window, length: int) -> None:
    positions = torch.arange(length)
    mask = allowed(window, positions, positions)
    assert window.allowed_pairs(length) == mask.sum()
    assert mask.diagonal().all()  # a token sees itself: no row is ever empty
    bounds = window.within(length)
    assert torch.equal(allowed(Window(**asdict(bounds)), positions, positions), mask)
    for q in range(length):
        begin, end = bounds.keys_of(q, q, length)
        seen = mask[q].clone()
        if q >= window.global_queries:
            seen[: window.global_keys] = False
            local = torch.zeros(length, dtype=torch.bool)
            local[begin:end] = True
            local[: window.global_keys] = False
            assert torch.equal(seen, local)


def test_the_mask_is_the_definition_pair_by_pair() -> None:
    positions = torch.arange(23)
    mask = allowed(Window(1, 2, unit=4, global_keys=3, global_queries=2), positions, positions)
    for q in range(23):
        for k in range(23):
            assert bool(mask[q, k]) == (-1 <= k // 4 - q // 4 <= 2 or k < 3 or q < 2), (q, k)


def test_pairs_of_a_length_whose_mask_could_not_be_built() -> None:
    """75,600 tokens in 21 frames: two frames to either side, and the first one for all."""
    frame = 3600
    in_window = 5 * 21 - 2 * (2 + 1)
    globals_only = 21 - 3  # queries of frames 0 .. 2 have the first frame in their window
    window = Window(2, 2, unit=frame, global_keys=frame)
    assert window.allowed_pairs(21 * frame) == (in_window + globals_only) * frame**2
    assert Window(3, 3).allowed_pairs(2**40) == 7 * 2**40 - 12


@given(windows)
def test_a_causal_window_sees_nothing_behind(window: Window) -> None:
    positions = torch.arange(20)
    mask = allowed(replace(window, causal=True), positions, positions)
    assert torch.equal(mask, allowed(replace(window, causal=False), positions, positions).tril())


@pytest.mark.parametrize("bad", [-1, 1.5, "64", False])
def test_sides_are_counts_or_none(bad: object) -> None:
    with pytest.raises(ValueError, match="window left must be None"):
        Window(bad, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="window right must be"):
        Window(0, bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"unit": 0}, "unit must be an integer >= 1, got 0"),
        ({"unit": 1.5}, "unit must be an integer >= 1, got 1.5"),
        ({"global_keys": -1}, "global_keys must be an integer >= 0, got -1"),
        ({"global_queries": True}, "global_queries must be an integer >= 0, got True"),
    ],
)
def test_counts_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Window(1, 1, **values)
