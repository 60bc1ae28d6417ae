import pytest
import torch

from attention import packed_patches


def test_frames_are_sequences() -> None:
    patches = packed_patches([(2, 4, 6), (1, 2, 2)])
    assert patches.cu_seqlens.tolist() == [0, 24, 48, 52]
    assert patches.cu_seqlens.dtype == torch.int32
    assert patches.tokens == 52
    assert patches.cos.shape == patches.sin.shape == (52, 32)


def test_columns_of_merge_blocks() -> None:
    """Two rows of three blocks of four patches; then a frame of one block, which has no other order."""
    patches = packed_patches([(1, 4, 6), (1, 2, 2)])
    blocks = [0, 3, 1, 4, 2, 5]
    expected = [4 * block + patch for block in blocks for patch in range(4)] + [24, 25, 26, 27]
    assert patches.column_order.tolist() == expected
    assert torch.equal(patches.column_order[patches.column_inverse], torch.arange(28))


def test_tables_turn_with_the_place_of_a_patch() -> None:
    patches = packed_patches([(1, 2, 2), (1, 4, 6)], head_dim=16)
    frequencies = [10_000 ** (-2 * i / 8) for i in range(4)]
    # Token 4 + 4 * 5 + 2 is the third patch, (1, 0), of the last block, at (1, 2), of the second grid.
    angles = torch.tensor([3 * f for f in frequencies] + [4 * f for f in frequencies])
    torch.testing.assert_close(patches.cos[26], angles.cos())
    torch.testing.assert_close(patches.sin[26], angles.sin())


def test_other_merge_sizes() -> None:
    patches = packed_patches([(1, 2, 3)], head_dim=4, merge_size=1)
    assert patches.column_order.tolist() == [0, 3, 1, 4, 2, 5]
    torch.testing.assert_close(patches.cos[5], torch.tensor([1.0, 2.0]).cos())


@pytest.mark.parametrize(
    ("grids", "head_dim", "message"),
    [
        ([], 64, "grids must hold at least one"),
        ([(1, 4, 6)], 18, "head_dim must be a multiple of 4, got 18"),
        ([(1, 4, 5)], 64, r"multiples of merge_size = 2, got \(1, 4, 5\)"),
        ([(0, 4, 4)], 64, r"must be \(frames, height, width\).*got \(0, 4, 4\)"),
    ],
)
def test_grids_that_do_not_fit(grids: list[tuple[int, int, int]], head_dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_patches(grids, head_dim=head_dim)
