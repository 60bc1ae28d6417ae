"""Attention backends by name."""

from collections.abc import Sequence

BACKENDS = ("anchor_local", "dense")


def check_backend(name: str, known: Sequence[str] = BACKENDS) -> None:
    """Raise ValueError, listing the known names, unless ``name`` is one of them."""
    if name not in known:
        raise ValueError(f"unknown attention backend {name!r}; known: {', '.join(known)}")
