"""Puts a backend into a Diffusers transformer's self-attention, and takes it out again.

Knows transformers, through the table of families. Does not know operators, which are behind
``backends.Backend``, nor jobs: what is dense, and why, it is told. Tokens are put into the backend's order
once, where the sequence is made (with the rotary tables), and back once, behind the last per-token layer;
between them every layer is per token or attention, and neither minds the order.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attention.backends import (
    Backend,
    BackendSettings,
    BlockUnit,
    DenseBackend,
    TokenOrderName,
    WindowUnit,
)
from attention.choice import Impl, Precision
from attention.dense import SDPA
from attention.diffusers_door import check_processor, register_backend
from attention.families import family_of, self_attention_modules
from attention.families.family import PerToken, TransformerFamily
from attention.families.joint import JointProcessor
from attention.families.moves import Move, along
from attention.forward import CURRENT, Counts, ForwardPass, swapped_attention, swapped_attention_
from attention.parallel.ranks import RankGroup
from attention.parallel.report import Exchange, ParallelReport
from attention.parallel.shards import Shards
from attention.parallel.support import anchored, check_pass, check_shareable
from attention.registry import Given, build_backend
from attention.window_sink.sinks import SinkMode

_KEY_PREFIX = "reelwright_"
_ANY_LAYER = -1  # of backends that do not look at it


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport(BackendSettings):
    """What ran since the swap, and with which settings.

    Attributes:
        backend: the backend asked for.
        implementation: what computed the sparse calls (``torch``, ``triton``, ``gluon``), or the dense ones
            if there were no others.
        dense_implementation: what computed the dense calls (``sdpa``, ``gluon``); ``sdpa`` if there are none.
        tokens: tokens of the clip in the last forward pass, 0 before the first.
        text_tokens: those of text beside them in self-attention, without padding; the most of a batch entry.
        density: allowed pairs over all pairs of the sparse calls; 1 if none was sparse.
        sparse_calls, dense_calls: self-attention calls of each kind.
        dense_reasons: why calls were dense, and how many.
    """

    backend: str
    implementation: str
    dense_implementation: str
    tokens: int
    text_tokens: int
    density: float
    sparse_calls: int
    dense_calls: int
    dense_reasons: dict[str, int]


@lru_cache(maxsize=256)
def _dispatcher_key(dense_layer: bool, layer: int = _ANY_LAYER) -> Any:
    """The key under which the Diffusers dispatcher finds self-attention of such a layer."""
    name = ("dense" if dense_layer else "sparse") + ("" if layer == _ANY_LAYER else f"_{layer}")
    return register_backend(_KEY_PREFIX + name, _backend_function(dense_layer, layer))


def _is_ours(processor: object) -> bool:
    if isinstance(processor, JointProcessor):
        return True
    key = getattr(processor, "_attention_backend", None)
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
        overwrites_query: bool = False,
        first_head: int = 0,
        _parallel_config: object | None = None,
    ) -> Tensor:
        if attn_mask is not None or dropout_p or is_causal or _parallel_config is not None:
            raise ValueError("swapped self-attention takes no mask, dropout, causal flag or parallel config")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if overwrites_query:
            swapped_attention_(query, key, value, scale, dense_layer, layer, first_head)
            return query
        out: Tensor = swapped_attention(query, key, value, scale, dense_layer, layer)
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
        ranks: RankGroup | None = None,
    ) -> None:
        self._backend = self._at_step = backend
        self._min_tokens = min_tokens
        self._ranks = ranks
        self._dense_reason: str | None = None
        self._counts = Counts()
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

    def set_step(self, step: int) -> None:
        """Say that the next forward passes are of this denoise step, counted from 0.

        Only a backend whose pattern changes with the step (``anchor_rotation``) needs to know.
        """
        self._at_step = self._backend.at_step(step)

    def report(self) -> SwapReport:
        """What ran so far."""
        counts = self._counts
        dense = "+".join(sorted(counts.dense_implementations)) or SDPA
        return SwapReport(
            **asdict(self._backend.settings),
            backend=self._backend.name,
            implementation="+".join(sorted(counts.implementations)) or dense,
            dense_implementation=dense,
            tokens=counts.tokens,
            text_tokens=counts.text_tokens,
            density=counts.density,
            sparse_calls=counts.sparse_calls,
            dense_calls=counts.dense_reasons.total(),
            dense_reasons=dict(counts.dense_reasons),
        )

    def parallel_report(self) -> ParallelReport | None:
        """What moved between ranks so far; None on one rank."""
        if self._ranks is None:
            return None
        counts, dense_calls = self._counts, self._counts.dense_reasons.total()
        kinds: dict[str, Exchange] = {"anchor_local": "anchors", "window": "heads"}
        return ParallelReport(
            ranks=self._ranks.size,
            sparse_exchange=kinds[self._backend.name] if counts.sparse_calls else None,
            sparse_call_bytes=counts.sparse_received_bytes // max(counts.sparse_calls, 1),
            dense_call_bytes=counts.dense_received_bytes // max(dense_calls, 1),
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
        heads = next(iter(modules.values())).heads
        self._backend.check(len(modules), heads, family.joint is not None)
        if self._ranks is not None:
            check_shareable(type(transformer).__name__, heads, self._backend, self._ranks.size)
        for layer, (name, module) in enumerate(modules.items()):
            if _is_ours(module.processor):
                raise ValueError(f"{type(transformer).__name__} is swapped already; remove that swap first")
            ours = _processor(
                family,
                name,
                module.processor,
                layer in dense_layers,
                layer if self._backend.differs_by_layer else _ANY_LAYER,
                self._backend.takes_some_heads and self._ranks is None,
            )
            self._processors.append((module, module.processor))
            module.processor = ours
        begin = _Begin(self, family, inspect.signature(type(transformer).forward))
        self._hooks += [
            transformer.register_forward_pre_hook(begin, with_kwargs=True),
            *(_register(transformer, move) for move in family.moves),
            transformer.register_forward_hook(_end, always_call=True),
        ]

    def begin_pass(
        self, transformer: Any, family: TransformerFamily, arguments: dict[str, Any]
    ) -> ForwardPass:
        """Decide about a forward pass; the hooks call this."""
        config = transformer.config
        if refusal := family.refused(config, arguments):
            raise ValueError(f"{type(transformer).__name__}: {refusal}")
        caches = bool(getattr(transformer, "is_cache_enabled", False))
        if caches and self._backend.settings.anchor_rotation:
            raise ValueError(
                "anchor_rotation changes the order of tokens between steps, and a cache that is enabled on "
                f"this {type(transformer).__name__} keeps hidden states between them; use one of the two"
            )
        grid = family.grid(config, arguments)
        plan = self._at_step.plan(grid)
        few = plan is not None and grid.tokens < self._min_tokens
        text = family.joint.text(arguments) if family.joint else None
        self._counts.tokens = grid.tokens
        self._counts.text_tokens = max(text.valid) if text else 0
        reason = "backend" if plan is None else "min_tokens" if few else self._dense_reason
        plan = None if few else plan
        shards = None
        if self._ranks is not None:
            stays = family.stays(config, arguments)
            check_pass(type(transformer).__name__, grid.tokens, self._ranks.size, caches=caches, stays=stays)
            shards = Shards(self._ranks, grid, anchored(plan))
        return ForwardPass(
            grid=grid,
            plan=plan,
            dense_reason=reason,
            counts=self._counts,
            text=text,
            # A dense pass needs no order; but what caches carry from step to step must keep one.
            moved=(caches or not reason) and not family.stays(config, arguments),
            shards=shards,
        )


@dataclass(frozen=True)
class _Begin:
    """Pre-hook of a transformer: sets the pass that begins, and orders the arguments that have tokens."""

    handle: SwapHandle
    family: TransformerFamily
    signature: inspect.Signature

    def __call__(
        self, transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments = self.signature.bind_partial(transformer, *args, **kwargs).arguments
        forward = self.handle.begin_pass(transformer, self.family, arguments)
        CURRENT.set(forward)
        changed = {
            argument.name: moved
            for argument in self.family.per_token
            if (moved := _moved(arguments.get(argument.name), argument, forward)) is not None
        }
        if not changed:
            return args, kwargs
        named = dict(arguments) | changed
        named.pop("self")
        return (), named


def _moved(value: Any, argument: PerToken, forward: ForwardPass) -> Any:
    """The argument in the order of the pass; None if it has no token in it, or nothing is moved."""
    first = value[0] if isinstance(value, tuple) else value
    if not isinstance(first, Tensor) or first.ndim <= argument.dim:
        return None
    order = forward.order(first.device) if first.shape[argument.dim] == forward.grid.tokens else None
    return None if order is None else along(argument.dim)(value, order.order, order.tokens)


def _register(transformer: nn.Module, move: Move) -> RemovableHandle:
    def apply(module: nn.Module, args: Any, output: Any) -> Any:
        forward = CURRENT.get()
        order = None if forward is None else forward.order(_device(output))
        return None if order is None else move.apply(output, order)

    return transformer.get_submodule(move.module).register_forward_hook(apply)


def _device(output: Tensor | tuple[Tensor, ...]) -> torch.device:
    return output.device if isinstance(output, Tensor) else output[0].device


def _end(module: nn.Module, args: Any, output: Any) -> None:
    CURRENT.set(None)


def _processor(
    family: TransformerFamily, name: str, stock: object, dense_layer: bool, layer: int, takes_some_heads: bool
) -> object:
    """What takes the place of a self-attention module's processor, and whether it takes some of the heads."""
    joint = family.joint
    if joint is not None:
        if type(stock).__name__ != joint.processor:
            raise ValueError(f"{name} has processor {type(stock).__name__}; expected {joint.processor}")
        return JointProcessor(joint.rotate, masked=joint.masked, dense_layer=dense_layer, layer=layer)
    check_processor(name, stock)
    # A copy, since one processor object may serve cross-attention too.
    ours: Any = copy.copy(stock)
    ours._attention_backend = _dispatcher_key(dense_layer, layer)
    ours.takes_some_heads = takes_some_heads
    return ours


def swap(
    target: Any,
    backend: str | Backend = "anchor_local",
    *,
    token_order: TokenOrderName | None = None,
    block_size: int | None = None,
    block_unit: BlockUnit | None = None,
    tile_thw: tuple[int, int, int] | None = None,
    anchor_stride: int | None = None,
    anchor_offset: int | None = None,
    anchor_rotation: bool | None = None,
    precision: Precision | None = None,
    window: tuple[int | None, int | None] | int | None = None,
    window_unit: WindowUnit | None = None,
    global_frames: int | None = None,
    sinks: Tensor | None = None,
    sink_mode: SinkMode | None = None,
    top_k: float | None = None,
    pooled_rest: bool | None = None,
    dense_layers: Sequence[int] = (),
    min_tokens: int = 0,
    impl: Impl = "auto",
    ranks: RankGroup | None = None,
) -> SwapHandle:
    """Replace the self-attention of a Diffusers transformer; cross-attention is never touched.

    Args:
        target: a transformer, or a pipeline that holds one (``transformer``, and ``transformer_2`` if any).
        backend: ``anchor_local``; ``block_topk``; ``window``; ``dense``, which replaces nothing but counts
            calls; or a backend that is made already, with all its settings.
        token_order: of ``anchor_local``: ``raster`` (the default), blocks of the caller's order; or ``tile``,
            boxes with anchors spread over all three axes.
        block_size: of a block of the raster, needed with it; ``block_topk`` needs this or tile_thw.
        block_unit: what it counts: ``tokens`` (the default) or latent ``frames``.
        tile_thw: sides of a box in tokens (time, height, width); needed with ``tile``.
        anchor_stride, anchor_offset: one in so many tokens is an anchor, and which one; default 0. The stride
            is needed by ``anchor_local``; without one ``block_topk`` has no anchors.
        anchor_rotation: the offset grows by one a denoise step (``set_step``); default no.
        precision: of ``anchor_local``: ``full`` (the default), the format of the inputs; or ``fp8``.
        window: of ``window``: units that a token sees to either side of its own, or (left, right); None in
            the pair is unbounded.
        window_unit: what the window counts: ``frames`` (latent ones, the default) or ``tokens``.
        global_frames: of ``window``: latent frames at the start that every token sees; default 0.
        sinks: of ``window``: float32 [heads] or [layers, heads], as trained; then no call may run dense.
        sink_mode: as for ``window_sink_attention``, required with sinks.
        top_k, pooled_rest: as for ``block_topk_attention``; the first is needed with it.
        dense_layers: layers, counted from 0, that always run dense.
        min_tokens: sequences shorter than this run dense.
        impl: as for the operators; ``auto`` takes a kernel on a GPU and PyTorch elsewhere.
        ranks: processes that share the tokens of each pass; all of them swap and call alike.

    Returns:
        The handle: ``report()`` says what ran, ``remove()`` restores the model exactly.

    Raises:
        ValueError: unknown backend, unsupported model, or settings out of range.
    """
    given = Given(
        token_order=token_order,
        block_size=block_size,
        block_unit=block_unit,
        tile_thw=tile_thw,
        anchor_stride=anchor_stride,
        anchor_offset=anchor_offset,
        anchor_rotation=anchor_rotation,
        precision=precision,
        window=window,
        window_unit=window_unit,
        global_frames=global_frames,
        sinks=sinks,
        sink_mode=sink_mode,
        top_k=top_k,
        pooled_rest=pooled_rest,
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
    return SwapHandle(_transformers(target), backend, dense_layers, min_tokens, ranks)


def check_ranks(target: Any, ranks: int) -> None:
    """Raise ValueError unless so many ranks can share the tokens of this transformer, or pipeline."""
    for transformer in _transformers(target):
        modules = self_attention_modules(transformer, family_of(transformer))
        heads = next(iter(modules.values())).heads
        check_shareable(type(transformer).__name__, heads, DenseBackend(), ranks)


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
