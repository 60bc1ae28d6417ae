"""Puts a backend into a Diffusers transformer's self-attention, and takes it out again.

Knows transformers and layouts. Does not know jobs: what is dense, and why, it is told. Tokens are put into
the anchors-first order once, where the sequence is made (with the rotary tables), and back once, behind the
last per-token layer; between them every layer is per token or attention, and neither minds the order.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.hooks import RemovableHandle

from attention.anchor_local.api import anchor_local_ordered
from attention.choice import Impl, resolve_impl
from attention.diffusers_door import check_processor, register_backend
from attention.families import TransformerFamily, family_of, self_attention_modules
from attention.layout import AnchorLocalLayout, anchor_local_layout
from attention.pattern import AnchorLocalPattern
from attention.registry import check_backend

DENSE_IMPLEMENTATION = "sdpa"


@dataclass(frozen=True, slots=True)
class SwapReport:
    """What ran since the swap.

    Attributes:
        backend: the backend asked for.
        implementation: what computed the sparse calls (``torch``, ``triton``); ``sdpa`` if there were none.
        tokens: sequence length of the last forward pass, 0 before the first.
        density: allowed pairs over all pairs of the sparse calls; 1 if none was sparse.
        sparse_calls, dense_calls: self-attention calls of each kind.
        dense_reasons: why calls were dense, and how many.
        block_size, anchor_stride, anchor_offset: the pattern, None for the dense backend.
    """

    backend: str
    implementation: str
    tokens: int
    density: float
    sparse_calls: int
    dense_calls: int
    dense_reasons: dict[str, int]
    block_size: int | None
    anchor_stride: int | None
    anchor_offset: int | None


@dataclass
class _Counts:
    tokens: int = 0
    sparse_calls: int = 0
    allowed_pairs: int = 0
    all_pairs: int = 0
    implementations: set[str] = field(default_factory=set)
    dense_reasons: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Forward:
    """One forward pass of a swapped transformer."""

    tokens: int
    pattern: AnchorLocalPattern | None
    dense_reason: str
    impl: Impl
    counts: _Counts

    def layout(self, device: torch.device) -> AnchorLocalLayout | None:
        """The token order of this pass, None if nothing is moved."""
        if self.pattern is None:
            return None
        return anchor_local_layout(self.pattern, self.tokens, device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, dense_layer: bool) -> Tensor:
        if self.pattern is None or dense_layer:
            self.counts.dense_reasons["dense_layers" if self.pattern else self.dense_reason] += 1
            return _dense(q, k, v, scale)
        self.counts.sparse_calls += 1
        self.counts.allowed_pairs += self.pattern.allowed_pairs(self.tokens)
        self.counts.all_pairs += self.tokens**2
        self.counts.implementations.add(resolve_impl(self.impl, q))
        layout = anchor_local_layout(self.pattern, self.tokens, q.device)
        return anchor_local_ordered(q, k, v, layout, scale=scale, impl=self.impl)


# The operator sees only q, k, v; the rest comes through here. It is read inside the custom op, so that one
# compiled graph serves all layers and steps.
_FORWARD: ContextVar[_Forward | None] = ContextVar("reelwright_forward", default=None)


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous()


@torch.library.custom_op("reelwright::swapped_attention", mutates_args=())
def _swapped_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, dense_layer: bool) -> Tensor:
    forward = _FORWARD.get()
    if forward is None:
        raise RuntimeError(
            "a swapped self-attention layer was called outside its transformer's forward pass; "
            "remove the swap before calling layers by themselves"
        )
    return forward.attend(q, k, v, scale, dense_layer)


@_swapped_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, dense_layer: bool) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _backend_function(dense_layer: bool) -> Any:
    """What the Diffusers dispatcher calls, for the layers that may be sparse or for those that never are."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        _parallel_config: object | None = None,
    ) -> Tensor:
        if attn_mask is not None or dropout_p or is_causal or _parallel_config is not None:
            raise ValueError("swapped self-attention takes no mask, dropout, causal flag or parallel config")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        out: Tensor = _swapped_attention(query, key, value, scale, dense_layer)
        return out

    return attend


_SPARSE_LAYER = _backend_function(dense_layer=False)
_DENSE_LAYER = _backend_function(dense_layer=True)


class SwapHandle:
    """A swap in force. Use it as a context manager, or call ``remove``."""

    def __init__(
        self,
        transformers: Sequence[nn.Module],
        backend: str,
        pattern: AnchorLocalPattern | None,
        dense_layers: Sequence[int],
        min_tokens: int,
        impl: Impl,
    ) -> None:
        self._backend = backend
        self._pattern = pattern
        self._min_tokens = min_tokens
        self._impl: Impl = impl
        self._dense_reason: str | None = None
        self._counts = _Counts()
        self._hooks: list[RemovableHandle] = []
        self._processors: list[tuple[Any, object]] = []
        try:
            for transformer in transformers:
                self._enter(transformer, frozenset(dense_layers))
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def set_dense(self, reason: str | None) -> None:
        """Run every call dense from the next forward pass on, for this reason; None: sparse again."""
        self._dense_reason = reason

    def report(self) -> SwapReport:
        """What ran so far."""
        counts, pattern = self._counts, self._pattern
        return SwapReport(
            backend=self._backend,
            implementation="+".join(sorted(counts.implementations)) or DENSE_IMPLEMENTATION,
            tokens=counts.tokens,
            density=counts.allowed_pairs / counts.all_pairs if counts.all_pairs else 1.0,
            sparse_calls=counts.sparse_calls,
            dense_calls=counts.dense_reasons.total(),
            dense_reasons=dict(counts.dense_reasons),
            block_size=pattern.block_size if pattern else None,
            anchor_stride=pattern.anchor_stride if pattern else None,
            anchor_offset=pattern.anchor_offset if pattern else None,
        )

    def remove(self) -> None:
        """Restore the transformer exactly. A second call does nothing."""
        for module, processor in self._processors:
            module.processor = processor
        for hook in self._hooks:
            hook.remove()
        self._processors.clear()
        self._hooks.clear()

    def _enter(self, transformer: nn.Module, dense_layers: frozenset[int]) -> None:
        family = family_of(transformer)
        modules = self_attention_modules(transformer, family)
        beyond = sorted(layer for layer in dense_layers if not 0 <= layer < len(modules))
        if beyond:
            raise ValueError(f"dense_layers names {beyond}, but there are layers 0 .. {len(modules) - 1}")
        sparse = register_backend("reelwright_sparse", _SPARSE_LAYER)
        dense = register_backend("reelwright_dense", _DENSE_LAYER)
        for layer, (name, module) in enumerate(modules.items()):
            check_processor(name, module.processor)
            if module.processor._attention_backend in (sparse, dense):
                raise ValueError(f"{type(transformer).__name__} is swapped already; remove that swap first")
            # A copy, since one processor object may serve cross-attention too.
            processor = copy.copy(module.processor)
            processor._attention_backend = dense if layer in dense_layers else sparse
            self._processors.append((module, module.processor))
            module.processor = processor
        self._hooks += self._order_hooks(transformer, family)

    def _order_hooks(self, transformer: nn.Module, family: TransformerFamily) -> list[RemovableHandle]:
        part = transformer.get_submodule
        return [
            transformer.register_forward_pre_hook(self._begin, with_kwargs=True),
            part(family.patch_embedding).register_forward_hook(_order_patches),
            part(family.rotary).register_forward_hook(_order_rotary),
            part(family.output_projection).register_forward_hook(_restore_order),
            transformer.register_forward_hook(_end, always_call=True),
        ]

    def _begin(
        self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Decide about this forward pass, before it begins."""
        named = dict(zip(("hidden_states", "timestep"), args, strict=False)) | kwargs
        hidden_states, timestep = named["hidden_states"], named["timestep"]
        patch: Sequence[int] = transformer.config.patch_size  # type: ignore[assignment,union-attr]
        tokens = 1
        for size, step in zip(hidden_states.shape[2:], patch, strict=True):
            tokens *= size // step
        reason = self._why_dense(tokens)
        forward = _Forward(tokens, None if reason else self._pattern, reason or "", self._impl, self._counts)
        self._counts.tokens = tokens
        _FORWARD.set(forward)
        layout = forward.layout(timestep.device)
        if layout is None or timestep.ndim < 2:
            return args, kwargs
        # One timestep for each token (Wan 2.2 TI2V) follows its token.
        ordered = timestep.index_select(1, layout.key_order)
        if "timestep" in kwargs:
            return args, kwargs | {"timestep": ordered}
        return (args[0], ordered, *args[2:]), kwargs

    def _why_dense(self, tokens: int) -> str | None:
        if self._pattern is None:
            return "backend"
        if tokens < self._min_tokens:
            return "min_tokens"
        return self._dense_reason


def _layout_for(x: Tensor) -> AnchorLocalLayout | None:
    forward = _FORWARD.get()
    return None if forward is None else forward.layout(x.device)


def _order_patches(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    """[B, C, T, H, W] with its positions in key order, laid out so that flattening it costs no copy."""
    layout = _layout_for(output)
    if layout is None:
        return None
    tokens = output.flatten(2).transpose(1, 2).index_select(1, layout.key_order)
    ordered: Tensor = tokens.transpose(1, 2).unflatten(2, output.shape[2:])
    return ordered


def _order_rotary(module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    layout = _layout_for(output[0])
    if layout is None:
        return None
    return tuple(table.index_select(1, layout.key_order) for table in output)


def _restore_order(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    layout = _layout_for(output)
    return None if layout is None else output.index_select(1, layout.query_inverse)


def _end(module: nn.Module, args: Any, output: Any) -> None:
    _FORWARD.set(None)


def swap(
    target: Any,
    backend: str = "anchor_local",
    *,
    block_size: int | None = None,
    anchor_stride: int | None = None,
    anchor_offset: int = 0,
    dense_layers: Sequence[int] = (),
    min_tokens: int = 0,
    impl: Impl = "auto",
) -> SwapHandle:
    """Replace the self-attention of a Diffusers transformer; cross-attention is never touched.

    Args:
        target: a transformer, or a pipeline that holds one (``transformer``, and ``transformer_2`` if any).
        backend: ``anchor_local``, or ``dense``, which replaces nothing but counts calls.
        block_size, anchor_stride, anchor_offset: the pattern in tokens; needed for ``anchor_local``.
        dense_layers: layers, counted from 0, that always run dense.
        min_tokens: sequences shorter than this run dense.
        impl: as for ``anchor_local_attention``; ``auto`` takes Triton on a GPU and PyTorch elsewhere.

    Returns:
        The handle: ``report()`` says what ran, ``remove()`` restores the model exactly.

    Raises:
        ValueError: unknown backend, unsupported model, or settings out of range.
    """
    check_backend(backend)
    pattern = None
    if backend == "anchor_local":
        if block_size is None or anchor_stride is None:
            raise ValueError("backend anchor_local needs block_size and anchor_stride")
        pattern = AnchorLocalPattern(block_size, anchor_stride, anchor_offset)
    elif block_size is not None or anchor_stride is not None or anchor_offset or dense_layers:
        raise ValueError("backend dense takes no block_size, anchor_stride, anchor_offset or dense_layers")
    if impl == "reference":
        raise ValueError("impl='reference' cannot be swapped in: it is defined on the caller's token order")
    return SwapHandle(_transformers(target), backend, pattern, dense_layers, min_tokens, impl)


def _transformers(target: Any) -> list[nn.Module]:
    if isinstance(target, nn.Module):
        return [target]
    found = [getattr(target, name, None) for name in ("transformer", "transformer_2")]
    modules = [module for module in found if isinstance(module, nn.Module)]
    if not modules:
        raise ValueError(f"{type(target).__name__} is no transformer and holds none")
    return modules
