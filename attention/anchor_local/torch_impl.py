"""anchor_local through PyTorch's own fused attention: what a CPU runs. Works on ordered tokens.

Each segment's queries meet the gathered anchors and their own segment in one dense call; segments of equal
length share a call. Nothing of size tokens x tokens is ever built.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention.layout import AnchorLocalLayout

# Anchor queries see all keys: some at a time, since dense attention stores its scores in some dtypes.
_ANCHOR_ROWS = 1024
# Upper bound of the copies of anchor keys that one batched call makes.
_COPY_BYTES = 64 * 2**20


def anchor_local_torch(q: Tensor, k: Tensor, v: Tensor, layout: AnchorLocalLayout, scale: float) -> Tensor:
    """Attention of ordered q [B, M, H, D] over ordered k, v [B, N, KV, D]; returns [B, M, H, D]."""
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v, out = (x.transpose(1, 2) for x in (q, k, v, result))  # [B, H, tokens, D]
    for begin in range(0, layout.anchor_queries, _ANCHOR_ROWS):
        rows = slice(begin, min(begin + _ANCHOR_ROWS, layout.anchor_queries))
        out[:, :, rows] = scaled_dot_product_attention(q[:, :, rows], k, v, scale=scale)
    for runs in _equal_runs(layout, bytes_per_key=2 * k[:, :, 0].numel() * k.element_size()):
        _attend(q, k, v, out, runs, layout.anchors, scale)
    return result


def _equal_runs(layout: AnchorLocalLayout, bytes_per_key: int) -> list[Tensor]:
    """Split the layout's runs into groups of equal query and key counts, none too large to copy at once."""
    lengths = torch.stack(
        [layout.runs[:, 1] - layout.runs[:, 0], layout.runs[:, 3] - layout.runs[:, 2]], dim=1
    )
    kinds, kind_of_run = lengths.unique(dim=0, return_inverse=True)
    groups: list[Tensor] = []
    for kind, (_, keys) in enumerate(kinds.tolist()):
        at_once = max(1, _COPY_BYTES // ((layout.anchors + keys) * bytes_per_key))
        groups.extend(layout.runs[kind_of_run == kind].split(at_once))
    return groups


def _attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, runs: Tensor, anchors: int, scale: float) -> None:
    """One dense call for runs of equal lengths; the runs become part of the batch."""
    batch, heads, _, head_dim = q.shape
    count = runs.shape[0]
    query_rows = _rows(runs[:, 0], runs[:, 1], q.device)  # [runs, queries]
    key_rows = _rows(runs[:, 2], runs[:, 3], q.device)  # [runs, keys]

    def gather(x: Tensor, rows: Tensor) -> Tensor:
        taken = x.index_select(2, rows.flatten()).view(batch, heads, count, rows.shape[1], head_dim)
        return taken.transpose(1, 2)  # [B, runs, H, rows, D]

    def with_anchors(x: Tensor) -> Tensor:
        shared = x[:, None, :, :anchors].expand(batch, count, heads, anchors, head_dim)
        return torch.cat([shared, gather(x, key_rows)], dim=3).flatten(0, 1)

    result = scaled_dot_product_attention(
        gather(q, query_rows).flatten(0, 1), with_anchors(k), with_anchors(v), scale=scale
    )
    result = result.view(batch, count, heads, -1, head_dim).transpose(1, 2)
    out.index_copy_(2, query_rows.flatten(), result.flatten(2, 3))


def _rows(begins: Tensor, ends: Tensor, device: torch.device) -> Tensor:
    length = int(ends[0] - begins[0])
    return (begins[:, None] + torch.arange(length)[None, :]).to(device)
