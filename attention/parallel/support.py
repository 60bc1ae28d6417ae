"""Which models and backends can run on several ranks, and how tokens are shared out for them.

Knows: the backends. Does not know: processes or transfers.
"""

from dataclasses import dataclass

from attention.anchor_local.backend import AnchorLocalBackend, AnchorLocalPlan
from attention.backends import Backend, DenseBackend, Plan
from attention.choice import Impl
from attention.layout import Pattern
from attention.window_sink.backend import WindowBackend


@dataclass(frozen=True, slots=True)
class Anchored:
    """Tokens are shared out by the anchors and segments of this pattern."""

    pattern: Pattern
    impl: Impl


def anchored(plan: Plan | None) -> Anchored | None:
    """How the tokens of such a pass are shared out; None: in raster order."""
    return Anchored(plan.pattern, plan.impl) if isinstance(plan, AnchorLocalPlan) else None


def check_shareable(model: str, heads: int, backend: Backend, ranks: int) -> None:
    """Raise ValueError unless so many ranks can share a model's self-attention with this backend."""
    if heads % ranks:
        fitting = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        raise ValueError(
            f"{model} has {heads} attention heads, which {ranks} ranks cannot share equally (dense attention "
            f"divides heads); ranks that fit: {fitting}"
        )
    if not isinstance(backend, AnchorLocalBackend | DenseBackend | WindowBackend):
        raise ValueError(
            f"backend {backend.name} runs on one rank only; on several: anchor_local, dense, window"
        )
    if isinstance(backend, AnchorLocalBackend) and backend.precision != "full":
        raise ValueError(
            f"precision={backend.precision!r} runs on one rank only; on several take precision='full'"
        )
    if isinstance(backend, WindowBackend) and backend.sinks is not None:
        raise ValueError("backend window with sinks runs on one rank only: sinks belong to heads")


def check_pass(model: str, tokens: int, ranks: int, *, caches: bool, stays: bool) -> None:
    """Raise ValueError unless so many ranks can share the tokens of this forward pass.

    ``caches``: Diffusers keeps hidden states between steps. ``stays``: layers need tokens where they are.
    """
    if stays:
        raise ValueError(
            f"{model} needs all tokens in raster order in this mode, so {ranks} ranks cannot share them; "
            "use one rank"
        )
    if caches:
        raise ValueError(
            f"a cache is enabled on this {model}, and each of {ranks} ranks would decide by its own tokens "
            "when to use it; disable it, or use one rank"
        )
    if tokens < ranks:
        raise ValueError(f"{model}: a clip of {tokens} tokens cannot be shared by {ranks} ranks")
