"""window_sink in PyTorch, in bands of queries: what a CPU runs.

A band of rows meets only the keys that one of its rows may see. The scores of one band are the largest thing
that is ever built: heads x rows x keys of the band, at most ``_SCORE_BYTES`` (or one row, if that is more).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from attention.window_sink.sinks import Sinks
from attention.window_sink.window import Window

_SCORE_BYTES = 32 * 2**20
_FEWEST_ROWS, _MOST_ROWS = 64, 512  # below, calls cost more than they do; above, keys outside the window do


def window_sink_torch(
    q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int], window: Window, scale: float, sinks: Sinks | None
) -> Tensor:
    """Attention of packed q [N, H, D] over k, v [N, KV, D]; returns [N, H, D].

    Computes in float64 if the inputs are, else in float32.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for begin, end in pairwise(bounds):
        length = end - begin
        left, right = window.within(length)
        rows = _rows_of_a_band(q.shape[1], length, left + right)
        for first in range(0, length, rows):
            last = min(first + rows, length)
            keys = slice(max(first - left, 0), min(last + right, length))
            seen = _seen(torch.arange(first, last), torch.arange(keys.start, keys.stop), left, right)
            out[begin + first : begin + last] = _attend(
                q[begin + first : begin + last],
                k[begin + keys.start : begin + keys.stop],
                v[begin + keys.start : begin + keys.stop],
                seen.to(q.device),
                scale,
                sinks if keys.start == 0 or (sinks and sinks.mode == "null_logit") else None,
            )
    return out


def _rows_of_a_band(heads: int, length: int, window_keys: int) -> int:
    rows = min(max(window_keys, _FEWEST_ROWS), _MOST_ROWS)
    keys = max(1, min(rows + window_keys, length))
    return max(1, min(rows, _SCORE_BYTES // (heads * keys * torch.float64.itemsize)))


def _seen(queries: Tensor, keys: Tensor, left: int, right: int) -> Tensor:
    """Boolean [queries, keys] from positions in the sequence."""
    return (keys >= queries[:, None] - left) & (keys <= queries[:, None] + right)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, sinks: Sinks | None) -> Tensor:
    """One band: q [R, H, D] over k, v [K, KV, D]; returns [R, H, D]. A key0_bias goes to the first key."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    # The rows of the query heads that share a key head lie in one matrix: keys are not repeated.
    queries = (q.to(wide) * scale).transpose(0, 1).reshape(kv_heads, -1, head_dim)
    keys, values = k.to(wide).transpose(0, 1), v.to(wide).transpose(0, 1)
    scores = (queries @ keys.mT).view(heads, rows, -1)
    if sinks is not None and sinks.mode == "key0_bias":
        scores[:, :, 0] += sinks.logits.to(wide)[:, None]
    scores.masked_fill_(~seen, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None and sinks.mode == "null_logit":
        null = sinks.logits.to(wide)[:, None, None]
        peak = torch.maximum(peak, null)
        weights = scores.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True) + (null - peak).exp()
    else:
        weights = scores.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
    attended = (weights.view(kv_heads, -1, keys.shape[1]) @ values).view(heads, rows, head_dim) / total
    return attended.transpose(0, 1).to(q.dtype)
