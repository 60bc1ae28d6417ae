"""The ring and the entries behind it."""

from dataclasses import replace

import pytest
import torch

from attention.selected.cache import KVCache, entries_of
from attention.selected.span import Span

CPU = torch.device("cpu")


def test_the_ring_holds_the_last_rows_wherever_a_call_ends() -> None:
    window, total = 5, 23
    rows = torch.arange(1.0, total + 1)[None, :, None].repeat(2, 1, 1)
    for portions in ((1,) * total, (23,), (4, 9, 1, 9), (5, 5, 13)):
        cache = KVCache(2, window, 0, 1, torch.float32, CPU)
        done = 0
        for count in portions:
            span = Span.following([done, done], [count, count], count, CPU)
            cache.fill_ring(rows[:, done : done + count], span)
            done += count
            for position in range(max(0, done - window), done):
                assert cache.ring[:, position % window, 0].tolist() == [position + 1.0] * 2


def test_the_ring_keeps_the_later_of_rows_in_one_slot() -> None:
    """Whatever the order in which they are written, which a GPU chooses: here the last tokens come first."""
    span = Span.following([3], [12], 12, CPU)
    backwards = replace(span, positions=span.positions.flip(1))
    cache = KVCache(1, 5, 0, 1, torch.float32, CPU)
    cache.fill_ring(backwards.positions[:, :, None].float(), backwards)
    assert cache.ring[0, :, 0].tolist() == [10.0, 11.0, 12.0, 13.0, 14.0]


def test_padding_is_not_kept() -> None:
    cache = KVCache(2, 3, 2, 1, torch.float32, CPU)
    span = Span.following([4, 0], [1, 2], 3, CPU)
    cache.fill_ring(torch.tensor([[1.0, 9, 9], [2, 3, 9]])[:, :, None], span)
    cache.append(torch.tensor([[5.0], [6.0]])[:, :, None], Span.following([3, 0], [1, 2], 2, CPU), 4)
    assert cache.rows[:, :, 0].tolist() == [[0, 1, 0, 5, 0], [2, 3, 0, 0, 0]]
    assert cache.entries[:, :, 0].tolist() == [[5, 0], [0, 0]]
    assert cache.rows.untyped_storage().data_ptr() == cache.ring.untyped_storage().data_ptr()


@pytest.mark.parametrize(("tokens", "ratio", "entries"), [(8, 4, 2), (9, 4, 3), (1, 128, 1), (5, 1, 5)])
def test_room_for_entries_is_rounded_up(tokens: int, ratio: int, entries: int) -> None:
    assert entries_of(tokens, ratio) == entries
