"""Who has which tokens: every one exactly once, in equal parts, with the rows that others need."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention import AnchorLocalPattern, TilePattern
from attention.layout import AnchorLocalLayout, Pattern, clip_layout
from attention.parallel.sharing import AnchorShare, Share, anchor_share, raster_share

CPU = torch.device("cpu")
WAN_720P = (21, 45, 80)


def shares_of(layout: AnchorLocalLayout, ranks: int, text: int = 0) -> list[tuple[Share, AnchorShare]]:
    shares = [anchor_share(layout, ranks, rank, text, CPU) for rank in range(ranks)]
    return [(share, share.anchored) for share in shares if share.anchored is not None]


def keys_of_each_query(layout: AnchorLocalLayout) -> dict[int, set[int]]:
    """Clip positions that each token which is no anchor sees."""
    order = layout.key_order.tolist()
    return {
        order[query]: {*order[: layout.anchors], *order[key_begin:key_end]}
        for begin, end, key_begin, key_end in layout.runs.tolist()
        for query in range(begin, end)
    }


def keys_on_the_ranks(shares: list[tuple[Share, AnchorShare]]) -> dict[int, set[int]]:
    """The same, from what each rank has and is sent."""
    counts = shares[0][1].anchors
    orders = [share.order.tolist() for share, _ in shares]
    anchors = [token for order, count in zip(orders, counts, strict=True) for token in order[:count]]
    others = [order[count:] for order, count in zip(orders, counts, strict=True)]
    seen: dict[int, set[int]] = {}
    for rank, (_, own) in enumerate(shares):
        received = [
            token
            for other, (_, theirs) in enumerate(shares)
            for token in others[other][slice(*theirs.sent[rank])]
        ]
        keys = [*anchors, *received[: own.before], *others[rank], *received[own.before :]]
        assert len(keys) == own.layout.tokens
        for begin, end, key_begin, key_end in own.layout.runs.tolist():
            for query in range(begin, end):
                seen[others[rank][query]] = {*anchors, *keys[key_begin:key_end]}
    return seen


patterns: st.SearchStrategy[Pattern] = st.one_of(
    st.builds(
        lambda block, stride, offset: AnchorLocalPattern(block, stride, offset % stride),
        st.integers(1, 70),
        st.integers(1, 20),
        st.integers(0, 19),
    ),
    st.builds(
        lambda tile, stride, offset: TilePattern(tile, stride, offset % stride),
        st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5)),
        st.integers(1, 20),
        st.integers(0, 19),
    ),
)
grids = st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(2, 7))


@given(pattern=patterns, grid=grids, ranks=st.integers(2, 5))
def test_ranks_have_what_their_queries_see(pattern: Pattern, grid: tuple[int, int, int], ranks: int) -> None:
    layout = clip_layout(pattern, grid, CPU)
    if layout.tokens < ranks:
        with pytest.raises(ValueError, match=r"tokens of a clip cannot be shared by \d ranks"):
            anchor_share(layout, ranks, 0, 0, CPU)
        return
    shares = shares_of(layout, ranks)
    assert torch.cat([share.order for share, _ in shares]).sort().values.tolist() == list(
        range(layout.tokens)
    )
    assert all(max(share.tokens) - min(share.tokens) <= 2 for share, _ in shares)
    assert keys_on_the_ranks(shares) == keys_of_each_query(layout)
    # Gathered with every rank's rows padded to the most that one has, `inverse` finds each token.
    most = max(shares[0][0].tokens)
    rows = torch.full((ranks, most), -1)
    for rank, (share, _) in enumerate(shares):
        rows[rank, : share.order.numel()] = share.order
    assert rows.flatten()[shares[0][0].inverse].tolist() == list(range(layout.tokens))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "pattern",
    [AnchorLocalPattern(3600, 16), AnchorLocalPattern(7200, 32), TilePattern((3, 15, 16), 32)],
    ids=["frames", "two frames", "tile"],
)
def test_shares_of_a_large_clip_are_within_a_64th(pattern: Pattern, ranks: int) -> None:
    shares = shares_of(clip_layout(pattern, WAN_720P, CPU), ranks)
    tokens = shares[0][0].tokens
    assert max(tokens) <= sum(tokens) / ranks * (1 + 1 / 64)
    # Only the two segments at a rank's ends may be cut: nothing beyond them is received.
    longest = int((shares[0][1].layout.runs[:, 3] - shares[0][1].layout.runs[:, 2]).max())
    assert all(sum(own.received) < 2 * longest for _, own in shares)


def test_segments_that_divide_are_not_cut() -> None:
    grid = (8, 30, 52)
    shares = shares_of(clip_layout(AnchorLocalPattern(1560, 16), grid, CPU), 4)
    assert [own.is_cut for _, own in shares] == [False] * 4
    assert [own.layout.runs.shape[0] for _, own in shares] == [2] * 4


def test_cuts_are_at_multiples_of_the_kernels_rows() -> None:
    shares = shares_of(clip_layout(AnchorLocalPattern(3600, 16), WAN_720P, CPU), 4)
    for _, own in shares:
        begin, end, key_begin, key_end = own.layout.runs[-1].tolist()
        first = own.layout.runs[0].tolist()
        assert (first[3] - first[2] - (first[1] - first[0])) % 128 == 0 or first[0] == 0
        assert end - begin == key_end - key_begin or (end - begin) % 128 == 0
    assert any(own.is_cut for _, own in shares)


def test_text_lies_before_the_anchors() -> None:
    layout = clip_layout(AnchorLocalPattern(20, 7), (3, 5, 7), CPU)
    (_, bare), (_, behind) = (shares_of(layout, 2, text)[0] for text in (0, 6))
    assert behind.layout.anchors == bare.layout.anchors + 6
    assert torch.equal(behind.layout.runs, bare.layout.runs + torch.tensor([0, 0, 6, 6]))


def test_raster_shares_are_runs() -> None:
    shares = [raster_share(10, 3, rank, CPU) for rank in range(3)]
    assert [share.order.tolist() for share in shares] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert shares[0].inverse.tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
    with pytest.raises(ValueError, match="2 tokens of a clip cannot be shared by 3 ranks"):
        raster_share(2, 3, 0, CPU)
