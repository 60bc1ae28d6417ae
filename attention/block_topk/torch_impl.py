"""block_topk through PyTorch's own fused attention: what a CPU runs. Works on ordered tokens.

The queries of a box meet the gathered keys of the boxes that they keep in one call for all heads. Heads may
keep boxes of unequal lengths; the shorter lists are padded behind a mask. On a GPU it waits for the device.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention.block_topk.layout import BoxLayout
from attention.block_topk.selection import box_means, box_scores, kept_counts, kept_pairs, selected_boxes

# Text and anchors see all keys: some at a time, since dense attention stores its scores in some dtypes.
_ROWS_AT_ONCE = 1024


def block_topk_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BoxLayout,
    *,
    top_k: float,
    pooled_rest: bool,
    scale: float,
    tally: Tensor | None,
) -> Tensor:
    """Attention of ordered q [B, N, H, D] over ordered k, v [B, N, KV, D]; returns [B, N, H, D]."""
    k_means = box_means(k, layout)
    scores = box_scores(box_means(q, layout), k_means, scale)
    selected = selected_boxes(scores, layout.always, kept_counts(layout, top_k)[0])
    if tally is not None:
        tally += kept_pairs(selected, layout)
    group = q.shape[2] // k.shape[2]
    rest = None
    if pooled_rest:
        rest = [x.to(k.dtype).repeat_interleave(group, dim=1) for x in (k_means, box_means(v, layout))]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v, out = (x.transpose(1, 2) for x in (q, k, v, result))  # [B, H, tokens, D]
    for begin in range(0, layout.first, _ROWS_AT_ONCE):
        rows = slice(begin, min(begin + _ROWS_AT_ONCE, layout.first))
        out[:, :, rows] = scaled_dot_product_attention(q[:, :, rows], k, v, scale=scale)
    for box in range(layout.boxes):
        rows = slice(layout.begins[box], layout.begins[box + 1])
        kept = selected[:, :, box]
        keys, values, bias = _gathered(k, v, layout, kept)
        if rest is not None:
            keys, values = torch.cat([keys, rest[0]], dim=2), torch.cat([values, rest[1]], dim=2)
            bias = _with_rest(keys, bias, layout, kept)
        out[:, :, rows] = scaled_dot_product_attention(
            q[:, :, rows], keys, values, attn_mask=None if bias is None else bias[:, :, None], scale=scale
        )
    return result


def _gathered(k: Tensor, v: Tensor, layout: BoxLayout, kept: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values [B, H, keys, D] that kept [B, H, boxes] lists, and what is added to their scores.

    None: nothing. Else [B, H, keys]: zero, and -inf for padding.
    """
    lengths = layout.bounds.diff().long()
    seen = kept.repeat_interleave(lengths, dim=-1)  # [B, H, tokens of boxes]
    seen = torch.cat([seen.new_ones(*seen.shape[:2], layout.first), seen], dim=-1)
    counts = seen.sum(-1)
    most, equal = int(counts.max()), int(counts.min()) == int(counts.max())
    if equal:
        index = seen.nonzero()[:, 2].view(*seen.shape[:2], most)
    else:  # those seen first, each in its place; the padding is of unseen tokens
        index = (~seen).to(torch.uint8).argsort(dim=-1, stable=True)[..., :most]
    keys, values = (x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3])) for x in (k, v))
    if equal:
        return keys, values, None
    padding = torch.arange(most, device=k.device) >= counts[..., None]
    bias = torch.zeros(padding.shape, dtype=_bias_dtype(k), device=k.device)
    return keys, values, bias.masked_fill(padding, float("-inf"))


def _with_rest(keys: Tensor, bias: Tensor | None, layout: BoxLayout, kept: Tensor) -> Tensor:
    """The same with one more entry for each box: the logarithm of its length, -inf if it is kept."""
    lengths = layout.bounds.diff().to(torch.float64).log().to(_bias_dtype(keys))
    of_rest = lengths.expand(kept.shape).masked_fill(kept, float("-inf"))
    if bias is None:
        bias = lengths.new_zeros(*keys.shape[:2], keys.shape[2] - layout.boxes)
    return torch.cat([bias, of_rest], dim=-1)


def _bias_dtype(keys: Tensor) -> torch.dtype:
    """A logarithm in bfloat16 is off by up to a 64th; on a GPU, kernels take the keys' dtype only."""
    return keys.dtype if keys.is_cuda else torch.promote_types(keys.dtype, torch.float32)
