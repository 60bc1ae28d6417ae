"""The definition of block_topk in plain PyTorch, on the caller's token order: what is tested against.

Nothing is ordered here and no layout is read: every token has the number of its box, and masks are explicit.
"""

import torch
from torch import Tensor

from attention.block_topk.boxes import BoxPattern
from attention.block_topk.layout import box_numbers
from attention.block_topk.selection import box_scores, selected_boxes
from attention.tiles import Grid

_ROWS_AT_ONCE = 512


def block_topk_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: BoxPattern,
    grid: Grid,
    *,
    top_k: float,
    pooled_rest: bool,
    text: int,
    scale: float,
) -> Tensor:
    """Selection, then masked softmax attention, in the dtype of the inputs.

    Args:
        q: [batch, text and the clip in raster order, heads, head_dim].
        k, v: [batch, tokens, kv_heads, head_dim]; heads is a multiple of kv_heads.

    Returns:
        [batch, tokens, heads, head_dim], dtype of q.
    """
    boxes, member = pattern.boxes(grid), members(pattern, grid, text).to(q.device)
    scores = box_scores(_means(q, member), _means(k, member), scale)
    always = torch.eye(len(boxes.lengths), dtype=torch.bool)
    for box, touching in enumerate(boxes.neighbours):
        always[box, list(touching)] = True
    counts = torch.tensor(boxes.kept(top_k), dtype=torch.int32)
    selected = selected_boxes(scores, always.to(q.device), counts.to(q.device))
    return attend_selected(q, k, v, member, selected, pooled_rest=pooled_rest, scale=scale)


def members(pattern: BoxPattern, grid: Grid, text: int) -> Tensor:
    """bool [boxes, tokens]: is the token one of the box? Anchors and text are of none; no row is empty."""
    number, is_anchor = box_numbers(pattern, grid)
    member = (number[None, :] == torch.arange(int(number.max()) + 1)[:, None]) & ~is_anchor
    member = member[member.any(1)]
    return torch.cat([torch.zeros(len(member), text, dtype=torch.bool), member], dim=1)


def attend_selected(
    q: Tensor, k: Tensor, v: Tensor, member: Tensor, selected: Tensor, *, pooled_rest: bool, scale: float
) -> Tensor:
    """Attention when it is known which boxes are kept.

    Args:
        member: bool [boxes, tokens]; tokens of no box see all and are seen by all.
        selected: bool [batch, heads, boxes, boxes].
        pooled_rest: each box that a query does not keep is one more key: the box's mean key and value, with a
            score of the mean key's plus the logarithm of the box's length.
    """
    group = q.shape[2] // k.shape[2]
    k_means, v_means = (_means(x, member).repeat_interleave(group, dim=1) for x in (k, v))
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    exact = ~member.any(0)
    box = member.int().argmax(0) if len(member) else None  # where not exact
    log_lengths = member.sum(1).to(q.dtype).log()
    out = torch.empty_like(q)
    for begin in range(0, q.shape[1], _ROWS_AT_ONCE):
        rows = slice(begin, min(begin + _ROWS_AT_ONCE, q.shape[1]))
        scores = torch.einsum("bqhd,bkhd->bhqk", q[:, rows], k) * scale
        if box is not None:
            of_rows = selected[:, :, box[rows]]
            seen = exact[rows][:, None] | exact | of_rows[..., box]
            scores = scores.masked_fill(~seen, float("-inf"))
        values = v.transpose(1, 2)
        if pooled_rest and box is not None:
            rest = torch.einsum("bqhd,bhkd->bhqk", q[:, rows], k_means.to(q.dtype)) * scale + log_lengths
            rest = rest.masked_fill(of_rows | exact[rows][:, None], float("-inf"))
            scores = torch.cat([scores, rest], dim=-1)
            values = torch.cat([values, v_means.to(v.dtype)], dim=2)
        out[:, rows] = (scores.softmax(-1) @ values).transpose(1, 2)
    return out


def _means(x: Tensor, member: Tensor) -> Tensor:
    """[batch, heads, boxes, head_dim], in float32 or float64."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    weights = member.to(wide)
    return torch.einsum("bkhd,jk->bhjd", x.to(wide), weights) / weights.sum(1)[:, None]
