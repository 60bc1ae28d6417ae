"""Attention backends by name."""

BACKENDS = ("anchor_local", "dense")


def check_backend(name: str) -> None:
    """Raise ValueError, listing the known names, unless ``name`` is one of them."""
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; known: {', '.join(BACKENDS)}")
