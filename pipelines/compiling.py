"""Regional compilation: one graph for all repeated blocks of a transformer.

Knows: torch.compile, and what it may cost. Does not know: models, jobs, or what blocks compute. Only a
block's own ``forward`` is replaced, so hooks on it (cancel, offload, caches) stay outside the graph. The
number of tokens is dynamic: another length or resolution compiles nothing. Self-attention is a custom
operator, so one graph serves all layers, steps and attention settings. Torch itself keeps compiled code on
disk, in ``TORCHINDUCTOR_CACHE_DIR``.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from configs.compute import CompileMode
from pipelines.failures import first_line

NOT_ON_A_CPU = "compile=auto does not compile on a CPU: little is gained there and compiling takes long"
TURNED_OFF = "compile=off"
FAILED = "compilation failed: "
# A few variants are expected: one or two passes in a batch, timesteps of the clip or of each token.
MOST_GRAPHS = 16
MOST_THREADS = 4
_THREAD = threading.local()


class CompileFailedError(RuntimeError):
    """Compilation failed, and the setting is to fail then."""


class RepeatedBlocks:
    """The repeated blocks of a loaded model, compiled or not."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device, mode: CompileMode) -> None:
        self.is_required = mode == "on"
        """Whether a failure to compile fails what needed it."""
        self.eager_reason: str | None = None
        """Why the blocks run eager; None: they run compiled."""
        if mode == "off":
            self.eager_reason = TURNED_OFF
        elif mode == "auto" and device.type == "cpu":
            self.eager_reason = NOT_ON_A_CPU
        else:
            self._compile(blocks)

    @classmethod
    def eager(cls) -> "RepeatedBlocks":
        """None at all, as of a pipeline that nobody asked to compile."""
        return cls([], torch.device("cpu"), "off")

    @property
    def have_failed(self) -> bool:
        """Whether they would run compiled, had that not failed."""
        return self.eager_reason is not None and self.eager_reason.startswith(FAILED)

    @property
    def are_compiled(self) -> bool:
        """Whether the next pass runs compiled blocks."""
        return self.eager_reason is None

    def _compile(self, blocks: Sequence[nn.Module]) -> None:
        classes = {type(block) for block in blocks}
        # One for each class, not for each block: weights are inputs of its graph.
        compiled = {kind: torch.compile(kind.forward, fullgraph=True, dynamic=True) for kind in classes}
        for block in blocks:
            block.forward = self._either(block, compiled[type(block)])

    def _either(self, block: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        eager = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.are_compiled:
                _limit_compilation()
                try:
                    return compiled(
                        block, *map(_no_view, args), **{k: _no_view(v) for k, v in kwargs.items()}
                    )
                except _compile_errors() as error:
                    self._failed(error)
            return eager(*args, **kwargs)

        return forward

    def _failed(self, error: Exception) -> None:
        # A failed backend names only itself in its first line.
        cause = getattr(error, "inner_exception", error)
        reason = f"{FAILED}{type(cause).__name__}: {first_line(cause)}"
        if self.is_required:
            raise CompileFailedError(f"compile=on, but {reason}") from error
        self.eager_reason = reason


def _limit_compilation() -> None:
    """Torch keeps such settings for each thread by itself, and each job has a thread of its own."""
    if getattr(_THREAD, "is_limited", False):
        return
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    torch._inductor.config.compile_threads = min(MOST_THREADS, os.cpu_count() or 1)
    _THREAD.is_limited = True


def _no_view(value: Any) -> Any:
    """The same values; a view of another tensor, as the first block gets, would have a graph of its own.

    So would a tuple of views, as rotary tables are until a sparse pass puts them in order, and a batch of one
    whose stride, which means nothing, is not that of other batches, as cuDNN gives it.
    """
    if type(value) is tuple:
        return tuple(map(_no_view, value))
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_contiguous():
        value = value.view(-1).view(value.shape)
    return value.data


def _compile_errors() -> tuple[type[Exception], ...]:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    return TorchDynamoException, FailOnRecompileLimitHit, CppCompileError, InvalidCxxCompiler
