import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention import AnchorLocalPattern, anchor_local_layout
from attention.anchor_local.reference import allowed

CPU = torch.device("cpu")


@given(st.integers(1, 120), st.integers(1, 40), st.integers(1, 130), st.data())
def test_ranges_are_exactly_the_mask(n: int, stride: int, block: int, data: st.DataObject) -> None:
    pattern = AnchorLocalPattern(block, stride, data.draw(st.integers(0, stride - 1)))
    q_start = data.draw(st.integers(0, n - 1))
    queries = data.draw(st.integers(1, n - q_start))
    layout = anchor_local_layout(pattern, n, CPU, q_start, queries)

    visited = torch.zeros(queries, n, dtype=torch.int64)
    visited[: layout.anchor_queries] += 1
    for begin, end, key_begin, key_end in layout.runs.tolist():
        assert begin < end
        visited[begin:end, : layout.anchors] += 1
        visited[begin:end, key_begin:key_end] += 1

    q_positions = torch.arange(q_start, q_start + queries)[layout.query_order]
    expected = allowed(pattern, q_positions, torch.arange(n)[layout.key_order])
    assert torch.equal(visited, expected.to(torch.int64))  # every allowed pair once, no other


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 300))
def test_orders_are_permutations_with_their_inverse(n: int, stride: int, block: int) -> None:
    layout = anchor_local_layout(AnchorLocalPattern(block, stride), n, CPU)
    assert torch.equal(layout.key_order.sort().values, torch.arange(n))
    assert torch.equal(layout.query_order, layout.key_order)
    assert torch.equal(layout.query_order[layout.query_inverse], torch.arange(n))


def test_the_same_layout_is_made_once() -> None:
    pattern = AnchorLocalPattern(8, 3)
    assert anchor_local_layout(pattern, 50, CPU) is anchor_local_layout(AnchorLocalPattern(8, 3), 50, CPU)


def test_queries_beyond_the_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"queries 8 \.\. 12 do not lie within 10 tokens"):
        anchor_local_layout(AnchorLocalPattern(4, 2), 10, CPU, 8, 5)
