"""Token order by boxes, and what selection must know of the boxes, on the device.

Knows nothing of kernels or models. Whatever every token sees comes first, then box after box::

    [ text | anchors | box 0 without anchors | box 1 without anchors | ... ]

so that a query needs one range at the start and a range for each box that it keeps.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from attention.block_topk.boxes import BoxPattern
from attention.layout import tile_anchors, tile_boxes
from attention.tiles import Grid, TilePattern


@dataclass(frozen=True, eq=False)
class BoxLayout:
    """Order of ``tokens`` tokens: text, if any, and a clip.

    Attributes:
        tokens: all of them.
        first: text and anchors: ordered tokens ``0 .. first - 1`` see all and are seen by all.
        order: int64 [tokens], on the device; ordered token i is token ``order[i]`` of the caller.
        inverse: int64 [tokens]; the caller's token r is ordered token ``inverse[r]``.
        begins: box i is ordered tokens ``begins[i] .. begins[i + 1] - 1``; one more than there are boxes.
        bounds: the same as int32 [boxes + 1] on the device.
        always: bool [boxes, boxes] on the device: itself and the boxes that touch it.
        neighbours: how many of these there are besides itself.
        log2_lengths: float32 [boxes] on the device: of the number of tokens.
    """

    tokens: int
    first: int
    order: Tensor
    inverse: Tensor
    begins: tuple[int, ...]
    bounds: Tensor
    always: Tensor
    neighbours: tuple[int, ...]
    log2_lengths: Tensor

    @property
    def boxes(self) -> int:
        """Number of boxes."""
        return len(self.begins) - 1

    @property
    def longest(self) -> int:
        """Tokens of the largest box; 0 if there is none."""
        return max((end - begin for begin, end in zip(self.begins, self.begins[1:], strict=False)), default=0)


@lru_cache(maxsize=64)
def box_layout(pattern: BoxPattern, grid: Grid, device: torch.device, text: int = 0) -> BoxLayout:
    """Layout of a clip of frames x rows x columns behind so many tokens of text.

    Raises:
        ValueError: more boxes than are possible.
    """
    boxes = pattern.boxes(grid)
    number, is_anchor = box_numbers(pattern, grid)
    clip = number.masked_fill(is_anchor, -1).argsort(stable=True) + text
    order = torch.cat([torch.arange(text), clip])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    first = text + boxes.anchors
    begins = tuple(accumulate(boxes.lengths, initial=first))
    count = len(boxes.lengths)
    always = torch.eye(count, dtype=torch.bool)
    for box, touching in enumerate(boxes.neighbours):
        always[box, list(touching)] = True
    return BoxLayout(
        tokens=order.numel(),
        first=first,
        order=order.to(device),
        inverse=inverse.to(device),
        begins=begins,
        bounds=torch.tensor(begins, dtype=torch.int32, device=device),
        always=always.to(device),
        neighbours=tuple(map(len, boxes.neighbours)),
        log2_lengths=torch.tensor(boxes.lengths, dtype=torch.float64).log2().to(device, torch.float32),
    )


def box_numbers(pattern: BoxPattern, grid: Grid) -> tuple[Tensor, Tensor]:
    """int64 and bool [tokens], in raster order: number of the token's box, and whether it is an anchor.

    Boxes that hold nothing but anchors count, too.
    """
    cut, tokens = pattern.pattern, grid[0] * grid[1] * grid[2]
    positions = torch.arange(tokens)
    if isinstance(cut, TilePattern):
        number, is_anchor = tile_boxes(cut, grid), tile_anchors(cut, grid)
    else:
        number = positions // cut.block_size
        is_anchor = positions % cut.anchor_stride == cut.anchor_offset
    return number, is_anchor if pattern.anchor_stride is not None else torch.zeros(tokens, dtype=torch.bool)
