"""Index lists against the rules written as loops, and the rules at their borders."""

import pytest
import torch

from attention.selected.indices import compressed_indices, shifted, visible_entries, window_indices


@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_window_of_the_ring(window: int) -> None:
    """What stands in slot p % window after p tokens is what token p - window + 1 .. p find there."""
    ring = [-1] * window
    for position in range(3 * window + 1):
        ring[position % window] = position
        width = min(window, position + 1)
        (lists,) = window_indices(torch.tensor([[position]]), window, width)[0].tolist()
        assert [ring[row] for row in lists] == list(range(position - width + 1, position + 1))


@pytest.mark.parametrize("start", [0, 1, 4, 5, 6, 17])
def test_window_across_the_ring_and_raw_rows(start: int) -> None:
    window, count = 5, 9
    ring = [-1] * window
    for position in range(start):
        ring[position % window] = position
    rows = ring + list(range(start, start + count))
    positions = torch.arange(start, start + count)[None]
    lists = window_indices(positions, window, window, torch.tensor([start]))
    for position, listed in zip(range(start, start + count), lists[0].tolist(), strict=True):
        seen = [rows[row] for row in listed if row >= 0]
        assert seen == list(range(max(0, position - window + 1), position + 1))


def test_padding_sees_nothing() -> None:
    positions = torch.tensor([[3, -1]])
    assert window_indices(positions, 4, 4, torch.tensor([3]))[0, 1].tolist() == [-1] * 4
    assert compressed_indices(positions, 2, 2)[0].tolist() == [[0, 1], [-1, -1]]
    assert compressed_indices(positions, 1, 1)[0].tolist() == [[0], [-1]]


@pytest.mark.parametrize(
    ("position", "ratio", "visible"),
    [
        *((0, 1, 1), (0, 4, 0), (2, 4, 0), (3, 4, 1), (4, 4, 1), (6, 4, 1), (7, 4, 2)),
        *((126, 128, 0), (127, 128, 1), (255, 128, 2)),
    ],
)
def test_an_entry_is_seen_from_the_token_that_closes_its_window(
    position: int, ratio: int, visible: int
) -> None:
    positions = torch.tensor([[position]])
    assert visible_entries(positions, ratio).tolist() == [[visible]]
    expected = [*range(visible), *[-1] * (5 - visible)]
    assert compressed_indices(positions, ratio, 5).tolist() == [[expected]]


def test_shifting_leaves_no_key() -> None:
    lists = torch.tensor([[[0, -1, 7]]], dtype=torch.int32)
    assert shifted(lists, 10).tolist() == [[[10, -1, 17]]]
    assert shifted(lists, 10).dtype == torch.int32
