"""The one place that imports Diffusers, and that touches its private attention dispatcher.

Diffusers looks a backend up in a registry keyed by a closed enum. We add a pseudo member of that enum under
which our function is found; only processors that hold the member call it. Nothing process-wide is switched:
cross-attention and other models keep their backend.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

BackendFunction = Callable[..., Tensor]


class DiffusersSeamError(RuntimeError):
    """The installed Diffusers has another attention dispatcher than the one this code was written for."""


@lru_cache(maxsize=8)
def register_backend(name: str, function: BackendFunction) -> Any:
    """Make ``function`` reachable through the dispatcher; returns the key to set as ``_attention_backend``.

    The function is called with query, key, value [B, N, H, D] and the dispatcher's other named arguments.

    Raises:
        DiffusersSeamError: a self-test through the dispatcher did not reach the function.
    """
    import diffusers
    from diffusers.models import attention_dispatch

    try:
        key = str.__new__(attention_dispatch.AttentionBackendName, name)
        key._name_, key._value_ = name.upper(), name
        attention_dispatch._AttentionBackendRegistry.register(key)(function)
        _self_test(attention_dispatch, key)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise DiffusersSeamError(
            f"diffusers {diffusers.__version__} does not take our attention backend ({error!r}); "
            "install diffusers>=0.42,<0.43"
        ) from error
    return key


def _self_test(attention_dispatch: Any, key: Any) -> None:
    """Send tensors that only a registered function could answer through the dispatcher."""
    registry = attention_dispatch._AttentionBackendRegistry
    function, calls = registry._backends[key], []

    def record(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        calls.append(query)
        return query

    probe = torch.zeros(1, 1, 1, 8)
    arguments = registry._supported_arg_names[key]
    registry.register(key)(record)
    try:
        answer = attention_dispatch.dispatch_attention_fn(probe, probe, probe, backend=key)
    finally:
        registry._backends[key] = function
        registry._supported_arg_names[key] = arguments
    if answer is not probe or len(calls) != 1:
        raise DiffusersSeamError("the attention dispatcher did not call the registered backend")


def check_processor(module_name: str, processor: object) -> None:
    """Raise ValueError unless the processor asks the dispatcher (and so can be given a backend)."""
    if not hasattr(processor, "_attention_backend"):
        raise ValueError(
            f"{module_name} uses {type(processor).__name__}, which bypasses Diffusers' attention dispatcher"
        )


def apply_rotary(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Diffusers' rotary embedding of [batch, tokens, heads, head_dim]; tables [tokens, head_dim]."""
    from diffusers.models.embeddings import apply_rotary_emb

    rotated: Tensor = apply_rotary_emb(x, tables, sequence_dim=1)
    return rotated
