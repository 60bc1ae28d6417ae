"""Places of the tokens of one call."""

import pytest
import torch

from attention.selected.span import Span


def test_positions_follow_and_padding_has_none() -> None:
    span = Span.following([0, 6, 3], [2, 3, 0], 3, "cpu")
    assert span.positions.tolist() == [[0, 1, -1], [6, 7, 8], [-1, -1, -1]]
    assert span.ends == (2, 9, 3)
    assert span.length == 3
    assert span.first_positions.tolist() == [0, 6, 3]


@pytest.mark.parametrize(
    ("start", "count", "closed"), [(0, 3, 0), (0, 4, 1), (3, 1, 1), (4, 3, 0), (3, 9, 3)]
)
def test_windows_that_close(start: int, count: int, closed: int) -> None:
    assert Span.following([start], [count], count, "cpu").closed_windows(4) == (closed,)


@pytest.mark.parametrize("counts", [[1], [1, -1], [1, 4]])
def test_counts_that_do_not_fit(counts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"counts must be 2 numbers of tokens, 0 .. 3"):
        Span.following([0, 0], counts, 3, torch.device("cpu"))
