"""Contract, validation and choice of implementation for block_topk."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from attention.block_topk.boxes import BoxPattern, check_top_k
from attention.block_topk.layout import BoxLayout, box_layout
from attention.block_topk.reference import block_topk_reference
from attention.block_topk.torch_impl import block_topk_torch
from attention.choice import Impl, resolve_impl
from attention.hopper_limits import hopper_takes
from attention.operands import check_not_empty, check_operands
from attention.tiles import Grid


def block_topk_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grid: Grid,
    top_k: float,
    tile_thw: Grid | None = None,
    block_size: int | None = None,
    anchor_stride: int | None = None,
    anchor_offset: int = 0,
    pooled_rest: bool = False,
    text: int = 0,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attention to the boxes that score highest, in the caller's token order. Forward only.

    Tokens of a clip are cut into boxes. For each batch entry and head, a box of queries scores every box of
    keys by the product of their mean query and mean key; it keeps itself, the boxes that touch it, and the
    best of the others, ``top_k`` boxes in all. Its queries attend to all tokens of the kept boxes, to the
    anchors and to the text; anchors and text attend to everything.

    Args:
        q: [batch, text tokens and then the clip in raster order, heads, head_dim].
        k, v: [batch, tokens, kv_heads, head_dim]; query head h uses key head ``h // (heads // kv_heads)``.
        grid: latent frames, rows and columns of the clip's tokens.
        top_k: boxes that a box keeps: below 1 a share of all (rounded up), else a count. A box and those that
            touch it (7 at most) are kept even if that is more.
        tile_thw: sides of a box in tokens: time, height, width.
        block_size: or the length of a box that is a run of the raster.
        anchor_stride, anchor_offset: one in so many tokens of the clip is an anchor, and which; None: none.
            As in ``anchor_local``: by raster position for runs, spread over all axes for sides. Anchors do
            not count to their boxes.
        pooled_rest: each box that is not kept is one more key: its mean key and mean value, with a score of
            the mean key's plus the logarithm of the box's length.
        text: tokens of text.
        scale: factor of the scores, positive; default ``head_dim ** -0.5``.
        impl: ``auto`` takes a kernel on a GPU and PyTorch elsewhere; a named one never falls back.
            ``triton`` is the kernel for all GPUs, which ``auto`` does not take where Hopper's own one fits.

    Returns:
        [batch, tokens, heads, head_dim], dtype of q.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit; the message says expected and got.
    """
    if torch.compiler.is_compiling():
        settings = (grid, float(top_k), tile_thw, block_size, anchor_stride, anchor_offset, pooled_rest, text)
        compiled: Tensor = _operator(q, k, v, *settings, scale, impl)
        return compiled
    pattern = BoxPattern(tile_thw, block_size, anchor_stride, anchor_offset)
    scale = _check(q, k, v, scale)
    check_top_k(top_k)
    if text < 0 or text + grid[0] * grid[1] * grid[2] != q.shape[1]:
        sides = " x ".join(map(str, grid))
        raise ValueError(f"q must have text={text} tokens and a clip of {sides}, got {q.shape[1]} tokens")
    chosen = implementation(impl, q)
    if chosen == "reference":
        return block_topk_reference(
            q, k, v, pattern, grid, top_k=top_k, pooled_rest=pooled_rest, text=text, scale=scale
        )
    layout = box_layout(pattern, cast(Grid, tuple(grid)), q.device, text)
    q, k, v = (x.index_select(1, layout.order) for x in (q, k, v))
    out = _run(chosen, q, k, v, layout, top_k, pooled_rest, scale, None)
    return out.index_select(1, layout.inverse)


def block_topk_ordered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BoxLayout,
    *,
    top_k: float,
    pooled_rest: bool = False,
    scale: float | None = None,
    impl: Impl = "auto",
    tally: Tensor | None = None,
) -> Tensor:
    """The same on tokens that already lie in the layout's order: nothing is moved.

    Args:
        q: [batch, tokens, heads, head_dim] in ``layout.order``; k, v with kv_heads.
        layout: from ``box_layout``.
        top_k, pooled_rest, scale: as for ``block_topk_attention``.
        impl: the same, without ``reference``.
        tally: int64 [] on the device of q. The pairs of a query and a key of kept boxes are added to it, over
            all heads and batch entries; those with anchors or text are not.

    Returns:
        [batch, tokens, heads, head_dim] in ``layout.order``.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit; the message says expected and got.
    """
    scale = _check(q, k, v, scale)
    check_top_k(top_k)
    if q.shape[1] != layout.tokens:
        raise ValueError(f"the layout is for {layout.tokens} tokens, got {q.shape[1]}")
    if tally is not None and (tally.dtype != torch.int64 or tally.ndim or tally.device != q.device):
        raise ValueError(
            f"tally must be int64 [] on {q.device}, got {tally.dtype} of shape {tuple(tally.shape)} "
            f"on {tally.device}"
        )
    return _run(implementation(impl, q), q, k, v, layout, top_k, pooled_rest, scale, tally)


def implementation(impl: Impl, q: Tensor) -> str:
    """What runs for such a q: ``reference``, ``torch``, ``triton``, or ``gluon``, Hopper's own kernel.

    ``impl="triton"`` means the kernel for all GPUs, on Hopper too.
    """
    chosen = resolve_impl(impl, q)
    takes = impl == "auto" and hopper_takes(q.device, q.dtype, q.shape[3])
    return "gluon" if chosen == "triton" and takes else chosen


@torch.library.custom_op("reelwright::block_topk_attention", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Sequence[int],
    top_k: float,
    tile_thw: Sequence[int] | None,
    block_size: int | None,
    anchor_stride: int | None,
    anchor_offset: int,
    pooled_rest: bool,
    text: int,
    scale: float | None,
    impl: str,
) -> Tensor:
    """What a compiled graph calls; it cannot look into kernels."""
    return block_topk_attention(
        q,
        k,
        v,
        grid=cast(Grid, tuple(grid)),
        top_k=top_k,
        tile_thw=None if tile_thw is None else cast(Grid, tuple(tile_thw)),
        block_size=block_size,
        anchor_stride=anchor_stride,
        anchor_offset=anchor_offset,
        pooled_rest=pooled_rest,
        text=text,
        scale=scale,
        impl=cast(Impl, impl),
    )


@_operator.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)


def _run(
    chosen: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BoxLayout,
    top_k: float,
    pooled_rest: bool,
    scale: float,
    tally: Tensor | None,
) -> Tensor:
    if chosen == "reference":
        raise ValueError("impl='reference' is defined on the caller's order: use block_topk_attention")
    run = block_topk_torch if chosen == "torch" else kernel(chosen)
    return run(q, k, v, layout, top_k=top_k, pooled_rest=pooled_rest, scale=scale, tally=tally)


def kernel(chosen: str) -> Callable[..., Tensor]:
    """``triton`` or ``gluon`` as a function of ordered (q, k, v, layout, ..., out=...)."""
    if chosen == "gluon":
        from attention.block_topk.hopper import block_topk_hopper

        return block_topk_hopper
    from attention.block_topk.triton_impl import block_topk_triton

    return block_topk_triton


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> float:
    """Validate the tensors and return the scale."""
    layout, shared = "batch, tokens, heads, head_dim", "batch, tokens, head_dim"
    scale = check_operands(q, k, v, layout=layout, shared=shared, scale=scale)
    check_not_empty(q, k)
    return scale
