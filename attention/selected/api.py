"""Contract, validation and choice of implementation for sparse_attn."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from attention.choice import Impl, checked_scale, resolve_impl
from attention.selected.hopper_limits import hopper_takes
from attention.selected.reference import sparse_attn_reference
from attention.selected.torch_impl import sparse_attn_torch

MAX_WIDTH = 576
_MOST_ROWS = 2**31 - 1  # what an int32 index can name


def sparse_attn(
    q: Tensor,
    kv: Tensor,
    sink: Tensor,
    topk_idxs: Tensor,
    scale: float | None = None,
    *,
    impl: Impl = "auto",
    checked: bool = False,
) -> Tensor:
    """Attention in which every query lists the rows that it sees; one row is key and value. Forward only.

    For query i of sequence b and head h, with rows r_1, r_2, ... those that ``topk_idxs[b, i]`` lists,

        out = sum_j exp(s_j) r_j / (exp(sink[h]) + sum_j exp(s_j)),    s_j = scale * q[b, i, h] . r_j

    Args:
        q: [batch, queries, heads, d].
        kv: [batch, rows, d] of the same dtype, shared by all heads. Rows that are not listed are not read.
        sink: float32 [heads]: one more entry of each softmax that has no value; not scaled; -inf is no sink.
        topk_idxs: int32 [batch, queries, k]; -1 lists no key, wherever it stands, and a row listed twice
            counts twice. Unless ``checked``, every other index that is no row lists no key either.
        scale: factor of the scores, positive; default ``d ** -0.5``.
        impl: ``auto`` takes a kernel on a GPU and PyTorch elsewhere; a named one never falls back.
            ``triton`` is the kernel for all GPUs, which ``auto`` does not take where Hopper's own one fits.
        checked: look at the values of ``topk_idxs`` and ``sink`` and refuse wrong ones. On a GPU this waits
            for the device.

    Returns:
        [batch, queries, heads, d], dtype of q; exactly 0 for a query that lists nothing.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit; if ``checked`` also an index that is
            neither -1 nor a row, or a sink that is NaN or +inf. The message says expected and got.
    """
    if torch.compiler.is_compiling():
        compiled: Tensor = _operator(q, kv, sink, topk_idxs, scale, impl, checked)
        return compiled
    _check(q, kv, sink, topk_idxs)
    scale = checked_scale(scale, q.shape[3])
    if checked:
        _check_values(sink, topk_idxs, kv.shape[1])
    return _function(implementation(impl, q, kv))(q, kv, sink, topk_idxs, scale)


def implementation(impl: Impl, q: Tensor, kv: Tensor) -> str:
    """What runs for such tensors: ``reference``, ``torch``, ``triton``, or ``gluon``, Hopper's own kernel.

    ``impl="triton"`` means the kernel for all GPUs, on Hopper too. ``auto`` takes it as well for rows that do
    not start at multiples of 16 bytes: a copy of kv would cost more than the faster kernel saves.
    """
    chosen = resolve_impl(impl, q)
    return "gluon" if chosen == "triton" and impl == "auto" and hopper_takes(q, kv) else chosen


def _function(chosen: str) -> Callable[..., Tensor]:
    """An implementation as a function of (q, kv, sink, topk_idxs, scale)."""
    if chosen == "gluon":
        from attention.selected.gluon_impl import sparse_attn_gluon

        return sparse_attn_gluon
    if chosen == "triton":
        from attention.selected.triton_impl import sparse_attn_triton

        return sparse_attn_triton
    return sparse_attn_reference if chosen == "reference" else sparse_attn_torch


@torch.library.custom_op("reelwright::sparse_attn", mutates_args=())
def _operator(
    q: Tensor, kv: Tensor, sink: Tensor, topk_idxs: Tensor, scale: float | None, impl: str, checked: bool
) -> Tensor:
    """What a compiled graph calls; it cannot look into kernels."""
    return sparse_attn(q, kv, sink, topk_idxs, scale, impl=cast(Impl, impl), checked=checked)


@_operator.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


def _check(q: Tensor, kv: Tensor, sink: Tensor, topk_idxs: Tensor) -> None:
    if q.ndim != 4:
        raise ValueError(f"q must be [batch, queries, heads, d], got shape {tuple(q.shape)}")
    if not q.dtype.is_floating_point:
        raise ValueError(f"q must be floating point, got {q.dtype}")
    batch, queries, heads, width = q.shape
    if heads < 1 or not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"q must have heads >= 1 and 1 <= d <= {MAX_WIDTH}, got {heads} and {width}")
    if kv.ndim != 3 or kv.shape[0] != batch or kv.shape[2] != width:
        raise ValueError(f"kv must be [batch, rows, d] = [{batch}, rows, {width}], got {tuple(kv.shape)}")
    if kv.shape[1] > _MOST_ROWS:
        raise ValueError(f"kv must have at most {_MOST_ROWS} rows, got {kv.shape[1]}")
    if kv.dtype != q.dtype:
        raise ValueError(f"q and kv must share their dtype, got {q.dtype} and {kv.dtype}")
    if sink.shape != (heads,) or sink.dtype != torch.float32:
        raise ValueError(
            f"sink must be float32 of shape [heads] = [{heads}], got {sink.dtype} of {tuple(sink.shape)}"
        )
    if topk_idxs.ndim != 3 or topk_idxs.shape[:2] != q.shape[:2] or topk_idxs.dtype != torch.int32:
        raise ValueError(
            f"topk_idxs must be int32 [batch, queries, k] = [{batch}, {queries}, k], "
            f"got {topk_idxs.dtype} of {tuple(topk_idxs.shape)}"
        )
    for name, x in (("kv", kv), ("sink", sink), ("topk_idxs", topk_idxs)):
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")


def _check_values(sink: Tensor, topk_idxs: Tensor, rows: int) -> None:
    wrong = (topk_idxs < -1) | (topk_idxs >= rows)
    if wrong.any():
        where = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"topk_idxs must be -1 or a row 0 .. {rows - 1}, got {int(topk_idxs[tuple(where)])} at {where}"
        )
    wrong = sink.isnan() | (sink == float("inf"))
    if wrong.any():
        head = int(wrong.nonzero()[0])
        raise ValueError(f"sink must be finite or -inf, got {float(sink[head])} at [{head}]")
