"""Contract, validation and choice of implementation for anchor_local."""

from collections.abc import Callable

from torch import Tensor

from attention.anchor_local.reference import anchor_local_reference
from attention.anchor_local.torch_impl import anchor_local_torch
from attention.choice import Impl, Precision, check_precision, resolve_impl
from attention.hopper_limits import hopper_takes
from attention.layout import AnchorLocalLayout, anchor_local_layout
from attention.operands import check_not_empty, check_operands
from attention.pattern import AnchorLocalPattern


def anchor_local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    anchor_stride: int,
    anchor_offset: int = 0,
    q_start: int = 0,
    scale: float | None = None,
    impl: Impl = "auto",
    precision: Precision = "full",
) -> Tensor:
    """Anchor+local attention in the caller's token order.

    A query q and a key k attend iff ``q // block_size == k // block_size`` or
    ``q % anchor_stride == anchor_offset`` or ``k % anchor_stride == anchor_offset``.

    Args:
        q: [batch, queries, heads, head_dim]; a chunk of queries whose first row is token ``q_start``.
        k, v: [batch, tokens, kv_heads, head_dim]; query head h uses key head ``h // (heads // kv_heads)``.
        block_size: tokens per local block.
        anchor_stride: every anchor_stride-th token is an anchor.
        anchor_offset: position of the first anchor, below anchor_stride.
        scale: factor of the scores, positive; default ``head_dim ** -0.5``.
        impl: ``auto`` takes a kernel on a GPU and PyTorch elsewhere; a named one never falls back.
            ``triton`` is the kernel for all GPUs, which ``auto`` does not take where Hopper's own one fits.
        precision: ``full`` computes in the format of q, ``fp8`` in 8 bits (q and k int8, weights and v e4m3).

    Returns:
        [batch, queries, heads, head_dim], dtype of q.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit; the message says expected and got.
    """
    pattern = AnchorLocalPattern(block_size, anchor_stride, anchor_offset)
    scale = _check(q, k, v, scale)
    if not 0 <= q_start <= k.shape[1] - q.shape[1]:
        raise ValueError(
            f"q_start must lie in 0 .. tokens - queries = {k.shape[1] - q.shape[1]}, got {q_start}"
        )
    check_precision(precision, impl, q.device)
    chosen = implementation(impl, q, precision)
    if chosen == "reference":
        return anchor_local_reference(q, k, v, pattern, q_start=q_start, scale=scale)
    layout = anchor_local_layout(pattern, k.shape[1], q.device, q_start, q.shape[1])
    ordered = _run(
        chosen,
        q.index_select(1, layout.query_order),
        k.index_select(1, layout.key_order),
        v.index_select(1, layout.key_order),
        layout,
        scale,
        precision,
    )
    return ordered.index_select(1, layout.query_inverse)


def anchor_local_ordered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnchorLocalLayout,
    *,
    scale: float | None = None,
    impl: Impl = "auto",
    precision: Precision = "full",
    out: Tensor | None = None,
) -> Tensor:
    """The same on tokens that already lie in the layout's order: nothing is moved.

    Args:
        q: [batch, queries, heads, head_dim] in ``layout.query_order``.
        k, v: [batch, tokens, kv_heads, head_dim] in ``layout.key_order``.
        layout: from ``anchor_local_layout``, for the same numbers of tokens and queries.
        scale: factor of the scores, positive; default ``head_dim ** -0.5``.
        impl: as for ``anchor_local_attention``, without ``reference``.
        precision: as there.
        out: where the result goes, of q's shape and dtype; it may be q itself, but not k or v.

    Returns:
        [batch, queries, heads, head_dim] in ``layout.query_order``; ``out`` if it was given.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit; the message says expected and got.
    """
    scale = _check(q, k, v, scale)
    if (q.shape[1], k.shape[1]) != (layout.queries, layout.tokens):
        raise ValueError(
            f"the layout is for {layout.queries} queries and {layout.tokens} tokens, "
            f"got {q.shape[1]} and {k.shape[1]}"
        )
    check_precision(precision, impl, q.device)
    if out is not None and (out.shape, out.dtype, out.device) != (q.shape, q.dtype, q.device):
        raise ValueError(
            f"out must be {q.dtype} of shape {tuple(q.shape)} on {q.device}, "
            f"got {out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )
    return _run(implementation(impl, q, precision), q, k, v, layout, scale, precision, out)


def implementation(impl: Impl, q: Tensor, precision: Precision) -> str:
    """What runs for such a q: ``reference``, ``torch``, ``triton``, or ``gluon``, Hopper's own kernel.

    ``impl="triton"`` means the kernel for all GPUs, on Hopper too.
    """
    chosen = resolve_impl(impl, q)
    takes = impl == "auto" and precision == "full" and hopper_takes(q.device, q.dtype, q.shape[3])
    return "gluon" if chosen == "triton" and takes else chosen


def _run(
    chosen: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AnchorLocalLayout,
    scale: float,
    precision: Precision,
    out: Tensor | None = None,
) -> Tensor:
    if chosen == "reference":
        raise ValueError("impl='reference' is defined on the caller's order: use anchor_local_attention")
    if chosen == "torch":
        found = anchor_local_torch(q, k, v, layout, scale)
        return found if out is None else out.copy_(found)
    return kernel(chosen, precision)(q, k, v, layout, scale, out=out)


def kernel(chosen: str, precision: Precision) -> Callable[..., Tensor]:
    """``triton`` or ``gluon`` as a function of ordered (q, k, v, layout, scale, out=...)."""
    if chosen == "gluon":
        from attention.anchor_local.hopper import anchor_local_hopper

        return anchor_local_hopper
    if precision == "fp8":
        from attention.anchor_local.fp8_impl import anchor_local_fp8

        return anchor_local_fp8
    from attention.anchor_local.triton_impl import anchor_local_triton

    return anchor_local_triton


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> float:
    """Validate the tensors and return the scale."""
    layout, shared = "batch, tokens, heads, head_dim", "batch, head_dim"
    scale = check_operands(q, k, v, layout=layout, shared=shared, scale=scale)
    check_not_empty(q, k)
    if q.shape[1] > k.shape[1]:
        raise ValueError(f"there are more queries than tokens: {q.shape[1]} and {k.shape[1]}")
    return scale
