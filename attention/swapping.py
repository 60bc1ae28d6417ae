"""Puts a backend into a Diffusers transformer's self-attention, and takes it out again.

Knows transformers. Does not know operators, which are behind ``backends.Backend``, nor jobs: what is dense,
and why, it is told. Tokens are put into the backend's order once, where the sequence is made (with the rotary
tables), and back once, behind the last per-token layer; between them every layer is per token or attention,
and neither minds the order.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.hooks import RemovableHandle

from attention.backends import Backend, BackendSettings, Plan, TokenGrid, TokenOrder, WindowUnit
from attention.choice import Impl
from attention.diffusers_door import check_processor, register_backend
from attention.families import TransformerFamily, family_of, self_attention_modules
from attention.registry import Given, build_backend
from attention.window_sink.sinks import SinkMode

DENSE_IMPLEMENTATION = "sdpa"
_KEY_PREFIX = "reelwright_"
_ANY_LAYER = -1  # of backends that do not look at it


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport(BackendSettings):
    """What ran since the swap, and with which settings.

    Attributes:
        backend: the backend asked for.
        implementation: what computed the sparse calls (``torch``, ``triton``); ``sdpa`` if there were none.
        tokens: sequence length of the last forward pass, 0 before the first.
        density: allowed pairs over all pairs of the sparse calls; 1 if none was sparse.
        sparse_calls, dense_calls: self-attention calls of each kind.
        dense_reasons: why calls were dense, and how many.
    """

    backend: str
    implementation: str
    tokens: int
    density: float
    sparse_calls: int
    dense_calls: int
    dense_reasons: dict[str, int]


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
    """One forward pass of a swapped transformer; without a plan all its calls are dense."""

    tokens: int
    plan: Plan | None
    dense_reason: str
    counts: _Counts

    def order(self, device: torch.device) -> TokenOrder | None:
        """The token order of this pass, None if nothing is moved."""
        return None if self.plan is None else self.plan.order(device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, dense_layer: bool, layer: int) -> Tensor:
        if self.plan is None or dense_layer:
            self.counts.dense_reasons["dense_layers" if self.plan else self.dense_reason] += 1
            return _dense(q, k, v, scale)
        self.counts.sparse_calls += 1
        self.counts.allowed_pairs += self.plan.allowed_pairs
        self.counts.all_pairs += self.tokens**2
        self.counts.implementations.add(self.plan.implementation(q))
        return self.plan.attend(q, k, v, scale, layer)


# The operator sees only q, k, v; the rest comes through here. It is read inside the custom op, so that one
# compiled graph serves all layers and steps.
_FORWARD: ContextVar[_Forward | None] = ContextVar("reelwright_forward", default=None)


def _dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous()


@torch.library.custom_op("reelwright::swapped_attention", mutates_args=())
def _swapped_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, dense_layer: bool, layer: int
) -> Tensor:
    forward = _FORWARD.get()
    if forward is None:
        raise RuntimeError(
            "a swapped self-attention layer was called outside its transformer's forward pass; "
            "remove the swap before calling layers by themselves"
        )
    return forward.attend(q, k, v, scale, dense_layer, layer)


@_swapped_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, dense_layer: bool, layer: int) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@lru_cache(maxsize=256)
def _dispatcher_key(dense_layer: bool, layer: int = _ANY_LAYER) -> Any:
    """The key under which the Diffusers dispatcher finds self-attention of such a layer."""
    name = ("dense" if dense_layer else "sparse") + ("" if layer == _ANY_LAYER else f"_{layer}")
    return register_backend(_KEY_PREFIX + name, _backend_function(dense_layer, layer))


def _is_ours(key: object) -> bool:
    return isinstance(key, str) and str.startswith(key, _KEY_PREFIX)


def _backend_function(dense_layer: bool, layer: int) -> Any:
    """What the dispatcher calls, for the layers that may be sparse or for those that never are."""

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
        out: Tensor = _swapped_attention(query, key, value, scale, dense_layer, layer)
        return out

    return attend


class SwapHandle:
    """A swap in force. Use it as a context manager, or call ``remove``."""

    def __init__(
        self,
        transformers: Sequence[nn.Module],
        backend: Backend,
        dense_layers: Sequence[int],
        min_tokens: int,
    ) -> None:
        self._backend = backend
        self._min_tokens = min_tokens
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
        """Run every call dense from the next forward pass on, for this reason; None: sparse again.

        Raises:
            ValueError: a reason for a backend that has sinks: dense calls would not use them.
        """
        if reason:
            _check_may_be_dense(self._backend, reason)
        self._dense_reason = reason

    def report(self) -> SwapReport:
        """What ran so far."""
        counts = self._counts
        return SwapReport(
            **asdict(self._backend.settings),
            backend=self._backend.name,
            implementation="+".join(sorted(counts.implementations)) or DENSE_IMPLEMENTATION,
            tokens=counts.tokens,
            density=counts.allowed_pairs / counts.all_pairs if counts.all_pairs else 1.0,
            sparse_calls=counts.sparse_calls,
            dense_calls=counts.dense_reasons.total(),
            dense_reasons=dict(counts.dense_reasons),
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
        self._backend.check(len(modules), next(iter(modules.values())).heads)
        for layer, (name, module) in enumerate(modules.items()):
            check_processor(name, module.processor)
            if _is_ours(module.processor._attention_backend):
                raise ValueError(f"{type(transformer).__name__} is swapped already; remove that swap first")
            # A copy, since one processor object may serve cross-attention too.
            processor = copy.copy(module.processor)
            processor._attention_backend = _dispatcher_key(
                layer in dense_layers, layer if self._backend.differs_by_layer else _ANY_LAYER
            )
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
        grid = TokenGrid(*(n // p for n, p in zip(hidden_states.shape[2:], patch, strict=True)))
        plan = self._backend.plan(grid)
        reason = self._why_dense(plan, grid.tokens)
        forward = _Forward(grid.tokens, None if reason else plan, reason or "", self._counts)
        self._counts.tokens = grid.tokens
        _FORWARD.set(forward)
        order = forward.order(timestep.device)
        if order is None or timestep.ndim < 2:
            return args, kwargs
        # One timestep for each token (Wan 2.2 TI2V) follows its token.
        ordered = timestep.index_select(1, order.order)
        if "timestep" in kwargs:
            return args, kwargs | {"timestep": ordered}
        return (args[0], ordered, *args[2:]), kwargs

    def _why_dense(self, plan: Plan | None, tokens: int) -> str | None:
        if plan is None:
            return "backend"
        return "min_tokens" if tokens < self._min_tokens else self._dense_reason


def _order_for(x: Tensor) -> TokenOrder | None:
    forward = _FORWARD.get()
    return None if forward is None else forward.order(x.device)


def _order_patches(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    """[B, C, T, H, W] with its positions in key order, laid out so that flattening it costs no copy."""
    order = _order_for(output)
    if order is None:
        return None
    tokens = output.flatten(2).transpose(1, 2).index_select(1, order.order)
    ordered: Tensor = tokens.transpose(1, 2).unflatten(2, output.shape[2:])
    return ordered


def _order_rotary(module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    order = _order_for(output[0])
    return None if order is None else tuple(table.index_select(1, order.order) for table in output)


def _restore_order(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    order = _order_for(output)
    return None if order is None else output.index_select(1, order.inverse)


def _end(module: nn.Module, args: Any, output: Any) -> None:
    _FORWARD.set(None)


def swap(
    target: Any,
    backend: str | Backend = "anchor_local",
    *,
    block_size: int | None = None,
    anchor_stride: int | None = None,
    anchor_offset: int | None = None,
    window: tuple[int | None, int | None] | int | None = None,
    window_unit: WindowUnit | None = None,
    global_frames: int | None = None,
    sinks: Tensor | None = None,
    sink_mode: SinkMode | None = None,
    dense_layers: Sequence[int] = (),
    min_tokens: int = 0,
    impl: Impl = "auto",
) -> SwapHandle:
    """Replace the self-attention of a Diffusers transformer; cross-attention is never touched.

    Args:
        target: a transformer, or a pipeline that holds one (``transformer``, and ``transformer_2`` if any).
        backend: ``anchor_local``; ``window``; ``dense``, which replaces nothing but counts calls; or a
            backend that is made already, with all its settings.
        block_size, anchor_stride, anchor_offset: the pattern of ``anchor_local`` in tokens; the first two are
            needed, the offset is 0.
        window: of ``window``: units that a token sees to either side of its own, or (left, right); None in
            the pair is unbounded.
        window_unit: what the window counts: ``frames`` (latent ones, the default) or ``tokens``.
        global_frames: of ``window``: latent frames at the start that every token sees; default 0.
        sinks: of ``window``: float32 [heads] or [layers, heads], as trained; then no call may run dense.
        sink_mode: as for ``window_sink_attention``, required with sinks.
        dense_layers: layers, counted from 0, that always run dense.
        min_tokens: sequences shorter than this run dense.
        impl: as for the operators; ``auto`` takes Triton on a GPU and PyTorch elsewhere.

    Returns:
        The handle: ``report()`` says what ran, ``remove()`` restores the model exactly.

    Raises:
        ValueError: unknown backend, unsupported model, or settings out of range.
    """
    given = Given(
        block_size=block_size,
        anchor_stride=anchor_stride,
        anchor_offset=anchor_offset,
        window=window,
        window_unit=window_unit,
        global_frames=global_frames,
        sinks=sinks,
        sink_mode=sink_mode,
    )
    if isinstance(backend, str):
        backend = build_backend(backend, given, impl)
    elif given.names or impl != "auto":
        raise ValueError(f"the {backend.name} backend has its settings already; give none beside it")
    if backend.name == "dense" and dense_layers:
        raise ValueError("backend dense takes no dense_layers")
    for name, value in (("dense_layers", dense_layers), ("min_tokens", min_tokens)):
        if value:
            _check_may_be_dense(backend, name)
    return SwapHandle(_transformers(target), backend, dense_layers, min_tokens)


def _check_may_be_dense(backend: Backend, reason: str) -> None:
    if backend.why_never_dense:
        raise ValueError(f"{reason}: no call may run dense, since {backend.why_never_dense}")


def _transformers(target: Any) -> list[nn.Module]:
    if isinstance(target, nn.Module):
        return [target]
    found = [getattr(target, name, None) for name in ("transformer", "transformer_2")]
    modules = [module for module in found if isinstance(module, nn.Module)]
    if not modules:
        raise ValueError(f"{type(target).__name__} is no transformer and holds none")
    return modules
