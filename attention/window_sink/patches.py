"""Packed patches of images and videos: sequences, two-dimensional rotary tables, row and column order.

A patch grid is (frames, height, width) in patches. Tokens come in merge blocks of ``merge_size`` squared
patches (what the encoder's last layer merges into one), the blocks of a frame in rows, the patches of a block
in rows. Every frame is a sequence of its own. Column order keeps the blocks whole and takes them in columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROTARY_THETA = 10_000.0


@dataclass(frozen=True, eq=False)
class PackedPatches:
    """What attention must know of the tokens of one batch, made once for all layers.

    Attributes:
        cu_seqlens: int32 [frames + 1], bounds of the frames.
        cos, sin: float32 [tokens, head_dim / 2], rotary tables in row order.
        column_order: int64 [tokens]; token i in column order is token ``column_order[i]`` in row order.
        column_inverse: int64 [tokens], the way back.
    """

    cu_seqlens: Tensor
    cos: Tensor
    sin: Tensor
    column_order: Tensor
    column_inverse: Tensor

    @property
    def tokens(self) -> int:
        """Number of patches of all grids."""
        return self.column_order.numel()


def packed_patches(
    grids: Sequence[tuple[int, int, int]],
    *,
    head_dim: int = 64,
    merge_size: int = 2,
    device: torch.device | str = "cpu",
) -> PackedPatches:
    """Tables for these patch grids, one behind the other.

    A quarter of ``head_dim`` frequencies turn with the row of a patch and as many with its column.

    Raises:
        ValueError: no grid, a side that merge_size does not divide, or a head_dim that 4 does not divide.
    """
    if not grids:
        raise ValueError("grids must hold at least one (frames, height, width)")
    if head_dim < 4 or head_dim % 4:
        raise ValueError(f"head_dim must be a multiple of 4, got {head_dim}")
    for grid in grids:
        if min(grid) < 1 or grid[1] % merge_size or grid[2] % merge_size:
            raise ValueError(
                f"a grid must be (frames, height, width) with height and width multiples of "
                f"merge_size = {merge_size}, got {grid}"
            )
    lengths = torch.tensor([height * width for frames, height, width in grids for _ in range(frames)])
    begins = lengths.cumsum(0) - lengths
    frame_grids = [(height, width) for frames, height, width in grids for _ in range(frames)]
    positions = torch.cat([_positions(height, width, merge_size) for height, width in frame_grids])
    columns = torch.cat(
        [
            begin + _column_order(height, width, merge_size)
            for begin, (height, width) in zip(begins, frame_grids, strict=True)
        ]
    )
    frequencies = ROTARY_THETA ** -(torch.arange(0, head_dim // 2, 2) / (head_dim // 2))
    angles = (positions[:, :, None] * frequencies).flatten(1)
    return PackedPatches(
        cu_seqlens=torch.cat([begins, lengths.sum()[None]]).to(device, torch.int32),
        cos=angles.cos().to(device),
        sin=angles.sin().to(device),
        column_order=columns.to(device),
        column_inverse=columns.argsort().to(device),
    )


def _positions(height: int, width: int, merge_size: int) -> Tensor:
    """[height * width, 2]: row and column of every patch of a frame, in row order of merge blocks."""
    grid = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    blocks = grid.view(height // merge_size, merge_size, width // merge_size, merge_size, 2)
    return blocks.transpose(1, 2).reshape(-1, 2)


def _column_order(height: int, width: int, merge_size: int) -> Tensor:
    blocks = torch.arange(height * width).view(height // merge_size, width // merge_size, merge_size**2)
    return blocks.transpose(0, 1).flatten()
