"""What every operator asks of its q, k and v.

Knows their layouts, [batch, tokens, heads, head_dim] or packed [total, heads, head_dim]. Does not know any
pattern.
"""

from torch import Tensor

from attention.choice import MAX_HEAD_DIM, checked_scale


def check_operands(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str, shared: str, scale: float | None
) -> float:
    """Validate the tensors and return the scale.

    Args:
        layout: names of the dimensions, the last two heads and head_dim: ``"total, heads, head_dim"``.
        shared: names of those in which q and k must be equal; ``"batch, head_dim"``.
        scale: factor of the scores; None: ``head_dim ** -0.5``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; the message says expected and got. Only the lengths
            of heads and head_dim must not be 0 here.
    """
    names = layout.split(", ")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != len(names):
            raise ValueError(f"{name} must be [{layout}], got shape {tuple(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"q, k and v must share dtype and device, got {q.dtype} on {q.device} "
                f"and {name} {x.dtype} on {x.device}"
            )
    if not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v must be floating point, got {q.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    if any(q.shape[names.index(name)] != k.shape[names.index(name)] for name in shared.split(", ")):
        *first, last = shared.split(", ")
        raise ValueError(
            f"q and k must share {', '.join(first)} and {last}, got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if 0 in q.shape[-2:] or 0 in k.shape[-2:]:
        raise ValueError(f"heads and head_dim may not be 0, got {tuple(q.shape)} and {tuple(k.shape)}")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(f"heads must be a multiple of kv_heads, got {q.shape[-2]} and {k.shape[-2]}")
    if q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {q.shape[-1]}")
    return checked_scale(scale, q.shape[-1])


def check_not_empty(q: Tensor, k: Tensor) -> None:
    """Raise ValueError if any dimension has no length."""
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"no dimension may be empty, got {tuple(q.shape)} and {tuple(k.shape)}")
