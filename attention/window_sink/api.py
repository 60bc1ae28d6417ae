"""Contract, validation and choice of implementation for window_sink."""

from itertools import pairwise
from typing import cast, get_args

import torch
from torch import Tensor

from attention.choice import Impl, resolve_impl
from attention.operands import check_operands
from attention.window_sink.reference import window_sink_reference
from attention.window_sink.sinks import SinkMode, Sinks
from attention.window_sink.torch_impl import window_sink_torch
from attention.window_sink.window import Window

MAX_TOKENS = 2**29  # positions are int32 in the kernel, and one position plus both sides must be one; so is
# the end of the window of the last unit, at most three times this


def window_sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    window: tuple[int | None, int | None],
    unit: int = 1,
    global_keys: int = 0,
    global_queries: int = 0,
    causal: bool = False,
    sinks: Tensor | None = None,
    sink_mode: SinkMode | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Sliding-window attention of packed sequences: a token sees its neighbours in its own. Forward only.

    A query q and a key k of one sequence, at positions counted from its first token, attend iff
    ``-left <= k // unit - q // unit <= right`` or ``k < global_keys`` or ``q < global_queries`` (and
    ``k <= q`` if ``causal``). A token always sees itself, so every row of the result is defined. Cost is
    tokens x (window + globals).

    Args:
        q: [total, heads, head_dim], the sequences one behind the other.
        k, v: [total, kv_heads, head_dim]; query head h uses key head ``h // (heads // kv_heads)``.
        cu_seqlens: int32 or int64 [sequences + 1] on the device of q; sequence i is rows
            ``cu_seqlens[i] .. cu_seqlens[i + 1] - 1``. It starts at 0, never falls (a sequence may be empty)
            and ends at total. The Triton implementation on a GPU reads it there and trusts its values, so
            that the call never waits for the device; every other one copies it to the host and checks it.
        window: (left, right) units of keys seen besides the query's own; None is unbounded, 0 is nothing.
        unit: tokens that share one window, such as those of a latent frame; a sequence starts with a whole
            unit and may end in a part of one.
        global_keys: the first keys of every sequence, seen by all its queries (once, in the window or not).
        global_queries: the first queries of every sequence, which see all its keys.
        causal: no key behind the query's own, whatever the rest says.
        sinks: float32 [heads], finite, not scaled; on the device of q.
        sink_mode: what the sinks mean, required with them. ``null_logit``: one more entry of each softmax
            that has no value. ``key0_bias``: added to the scaled score of each sequence's first key, for the
            queries that see it.
        scale: factor of the scores, positive; default ``head_dim ** -0.5``.
        impl: ``auto`` takes Triton on a GPU and PyTorch elsewhere; a named one never falls back.

    Returns:
        [total, heads, head_dim], dtype of q.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit; the message says expected and got.
    """
    if torch.compiler.is_compiling():
        left, right = window
        settings = (left, right, unit, global_keys, global_queries, causal)
        compiled: Tensor = _operator(q, k, v, cu_seqlens, *settings, sinks, sink_mode, scale, impl)
        return compiled
    seen = Window(*window_pair(window), unit, global_keys, global_queries, causal)
    scale = _check(q, k, v, scale)
    _check_cu_seqlens(cu_seqlens, q)
    checked_sinks = check_sinks(sinks, sink_mode)
    if checked_sinks is not None:
        _check_sinks_of(q, checked_sinks.logits)
    chosen = resolve_impl(impl, q)
    if chosen == "triton":
        if not cu_seqlens.is_cuda:
            sequence_bounds(cu_seqlens, q.shape[0])
        from attention.window_sink.triton_impl import window_sink_triton

        return window_sink_triton(q, k, v, cu_seqlens, seen, scale, checked_sinks)
    run = window_sink_reference if chosen == "reference" else window_sink_torch
    return run(q, k, v, sequence_bounds(cu_seqlens, q.shape[0]), seen, scale, checked_sinks)


@torch.library.custom_op("reelwright::window_sink_attention", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    left: int | None,
    right: int | None,
    unit: int,
    global_keys: int,
    global_queries: int,
    causal: bool,
    sinks: Tensor | None,
    sink_mode: str | None,
    scale: float | None,
    impl: str,
) -> Tensor:
    """What a compiled graph calls; it cannot look into kernels, and values of cu_seqlens it does not have."""
    return window_sink_attention(
        q,
        k,
        v,
        cu_seqlens,
        window=(left, right),
        unit=unit,
        global_keys=global_keys,
        global_queries=global_queries,
        causal=causal,
        sinks=sinks,
        sink_mode=cast(SinkMode | None, sink_mode),
        scale=scale,
        impl=cast(Impl, impl),
    )


@_operator.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


def sequence_bounds(cu_seqlens: Tensor, total: int) -> list[int]:
    """The values of cu_seqlens on the host, checked; on a GPU this waits for the device.

    Raises:
        ValueError: they do not start at 0, fall somewhere, or do not end at ``total``.
    """
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != total:
        raise ValueError(
            f"cu_seqlens must start at 0 and end at total = {total}, got {bounds[0]} and {bounds[-1]}"
        )
    for index, (begin, end) in enumerate(pairwise(bounds)):
        if begin > end:
            raise ValueError(
                f"cu_seqlens must not fall, got {begin} and then {end} at {index} and {index + 1}"
            )
    return bounds


def window_pair(window: tuple[int | None, int | None]) -> tuple[int | None, int | None]:
    """The window as a pair. Raises ValueError if it is none."""
    if not isinstance(window, tuple) or len(window) != 2:
        raise ValueError(f"window must be a pair (left, right), got {window!r}")
    return window


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> float:
    """Validate the tensors and return the scale."""
    layout, shared = "total, heads, head_dim", "total, head_dim"
    scale = check_operands(q, k, v, layout=layout, shared=shared, scale=scale)
    if q.shape[0] > MAX_TOKENS:
        raise ValueError(f"total must be at most {MAX_TOKENS}, got {q.shape[0]}")
    return scale


def _check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens must be int32 or int64 [sequences + 1], "
            f"got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on the device of q, {q.device}, got {cu_seqlens.device}")
    if cu_seqlens.numel() < 1 or (cu_seqlens.numel() == 1 and q.shape[0]):
        raise ValueError(
            f"cu_seqlens must hold both ends of every sequence, got {cu_seqlens.numel()} values "
            f"for {q.shape[0]} tokens"
        )


def check_sinks(sinks: Tensor | None, sink_mode: SinkMode | None) -> Sinks | None:
    """Both together. Raises ValueError if one comes without the other, or for another dtype or mode."""
    known = ", ".join(get_args(SinkMode))
    if sinks is None:
        if sink_mode is not None:
            raise ValueError(f"sink_mode {sink_mode!r} was given without sinks")
        return None
    if sink_mode is None or sink_mode not in get_args(SinkMode):
        raise ValueError(f"sinks need a sink_mode, one of {known}, got {sink_mode!r}")
    if sinks.dtype != torch.float32:
        raise ValueError(f"sinks must be float32, got {sinks.dtype} of shape {tuple(sinks.shape)}")
    return Sinks(sinks, sink_mode)


def _check_sinks_of(q: Tensor, sinks: Tensor) -> None:
    if sinks.shape != (q.shape[1],):
        raise ValueError(
            f"sinks must be float32 of shape [heads] = [{q.shape[1]}], "
            f"got {sinks.dtype} of shape {tuple(sinks.shape)}"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on the device of q, {q.device}, got {sinks.device}")
