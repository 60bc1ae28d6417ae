"""window_sink in PyTorch, in bands of queries: what a CPU runs.

A band of rows meets only the keys that one of its rows may see. Where all its rows see the same keys, as
those of one latent frame do, and there are no sinks, PyTorch's fused attention does it without any mask;
elsewhere the scores of one band are the largest thing that is ever built: heads x rows x keys of the band, at
most ``_SCORE_BYTES`` (or one row, if that is more).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention.window_sink.sinks import Sinks
from attention.window_sink.window import Bounds, Window

Ranges = tuple[tuple[int, int], ...]

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
        rows = slice(begin, end)
        _attend_sequence(q[rows], k[rows], v[rows], out[rows], window.within(end - begin), scale, sinks)
    return out


def _attend_sequence(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, bounds: Bounds, scale: float, sinks: Sinks | None
) -> None:
    for first, last in _bands(bounds, *q.shape[:2]):
        ranges = _keys(bounds, first, last, q.shape[0])
        keys, values = (
            torch.cat([x[a:b] for a, b in ranges]) if ranges[1:] else x[slice(*ranges[0])] for x in (k, v)
        )
        is_same = _keys(bounds, first, first + 1, q.shape[0]) == _keys(bounds, last - 1, last, q.shape[0])
        if is_same and sinks is None and not q.is_cuda:
            out[first:last] = _fused(q[first:last], keys, values, scale)
            continue
        positions = torch.cat([torch.arange(a, b) for a, b in ranges])
        seen = _seen(torch.arange(first, last), positions, bounds)
        applies = sinks is not None and (sinks.mode == "null_logit" or ranges[0][0] == 0)
        out[first:last] = _attend(
            q[first:last], keys, values, seen.to(q.device), scale, sinks if applies else None
        )


def _bands(bounds: Bounds, length: int, heads: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each band. None holds both global queries and others, or parts of two long units."""
    cuts = {0, bounds.global_queries, length}
    if bounds.unit >= _FEWEST_ROWS:
        cuts |= set(range(0, length, bounds.unit))
    window_keys = (bounds.left + bounds.right + 1) * bounds.unit - 1 + bounds.global_keys
    for begin, end in pairwise(sorted(cuts)):
        is_global = begin < bounds.global_queries
        rows = _rows_of_a_band(heads, length, length if is_global else window_keys)
        for first in range(begin, end, rows):
            yield first, min(first + rows, end)


def _rows_of_a_band(heads: int, length: int, window_keys: int) -> int:
    rows = min(max(window_keys, _FEWEST_ROWS), _MOST_ROWS)
    keys = max(1, min(rows + window_keys, length))
    return max(1, min(rows, _SCORE_BYTES // (heads * keys * torch.float64.itemsize)))


def _keys(bounds: Bounds, first: int, last: int, length: int) -> Ranges:
    """Begins and ends of the keys that a query first .. last - 1 sees: one range, or the globals' and one."""
    furthest = last if bounds.causal else length
    if first < bounds.global_queries:
        return ((0, furthest),)
    begin, end = bounds.keys_of(first, last - 1, length)
    globals_end = min(bounds.global_keys, furthest)
    if begin <= globals_end:
        return ((0, max(end, globals_end)),)
    return ((0, globals_end), (begin, end)) if globals_end else ((begin, end),)


def _seen(queries: Tensor, keys: Tensor, bounds: Bounds) -> Tensor:
    """Boolean [queries, keys] from positions in the sequence."""
    queries = queries[:, None]
    distance = keys // bounds.unit - queries // bounds.unit
    seen = (distance >= -bounds.left) & (distance <= bounds.right)
    seen |= (keys < bounds.global_keys) | (queries < bounds.global_queries)
    return seen & (keys <= queries) if bounds.causal else seen


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One band without a mask: q [R, H, D] over k, v [K, KV, D]; returns [R, H, D]."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1)


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
