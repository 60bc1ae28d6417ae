import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.window_sink.reference import allowed
from attention.window_sink.window import Window

side = st.none() | st.integers(0, 50)


@given(side, side, st.integers(0, 40))
def test_counted_pairs_are_those_of_the_mask(left: int | None, right: int | None, length: int) -> None:
    window = Window(left, right)
    positions = torch.arange(length)
    mask = allowed(window, positions, positions)
    assert window.allowed_pairs(length) == mask.sum()
    assert mask.diagonal().all()  # a token sees itself: no row is ever empty
    assert torch.equal(allowed(Window(*window.within(length)), positions, positions), mask)


@given(side, side)
def test_a_causal_window_sees_nothing_behind(left: int | None, right: int | None) -> None:
    positions = torch.arange(20)
    mask = allowed(Window(left, right).causal(), positions, positions)
    assert torch.equal(mask, allowed(Window(left, right), positions, positions).tril())


@pytest.mark.parametrize("bad", [-1, 1.5, "64", False])
def test_sides_are_counts_or_none(bad: object) -> None:
    with pytest.raises(ValueError, match="window left must be None"):
        Window(bad, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="window right must be"):
        Window(0, bad)  # type: ignore[arg-type]
