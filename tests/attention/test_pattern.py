import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention import AnchorLocalPattern, density
from attention.anchor_local.reference import allowed

sizes = st.integers(1, 200)


@given(sizes, sizes, st.data())
def test_density_counts_the_mask(n: int, stride: int, data: st.DataObject) -> None:
    block = data.draw(st.integers(1, 250))
    offset = data.draw(st.integers(0, stride - 1))
    positions = torch.arange(n)
    pairs = int(allowed(AnchorLocalPattern(block, stride, offset), positions, positions).sum())
    assert AnchorLocalPattern(block, stride, offset).allowed_pairs(n) == pairs
    assert density(n, block, stride, offset) == pairs / n**2


def test_mask_is_the_definition_pair_by_pair() -> None:
    n, block, stride, offset = 23, 5, 4, 3
    positions = torch.arange(n)
    mask = allowed(AnchorLocalPattern(block, stride, offset), positions, positions)
    for q in range(n):
        for k in range(n):
            expected = q // block == k // block or q % stride == offset or k % stride == offset
            assert bool(mask[q, k]) == expected, (q, k)


@pytest.mark.parametrize(("block", "stride"), [(10, 1), (100, 7), (5000, 7)])
def test_one_block_or_all_anchors_is_dense(block: int, stride: int) -> None:
    assert density(100, block, stride) == 1.0


def test_density_at_a_length_whose_mask_could_not_be_built() -> None:
    # 400,000 tokens: anchors 25,000; 64 blocks of 6,250 tokens, of which 390 or 391 are anchors.
    n, block, stride = 400_000, 6_250, 16
    pairs = 25_000 * n
    for index in range(64):
        anchors = sum(1 for t in range(index * block, (index + 1) * block) if t % stride == 0)
        pairs += (block - anchors) * (25_000 + block - anchors)
    assert density(n, block, stride) == pairs / n**2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 0, 1, 0), "block_size must be at least 1, got 0"),
        ((10, 1, 0, 0), "anchor_stride must be at least 1, got 0"),
        ((10, 1, 4, 4), r"anchor_offset must lie in \[0, anchor_stride=4\), got 4"),
        ((10, 1, 4, -1), "got -1"),
        ((0, 1, 1, 0), "tokens must be at least 1, got 0"),
    ],
)
def test_values_out_of_range_are_named(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        density(*arguments)
