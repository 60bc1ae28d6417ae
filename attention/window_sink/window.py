"""The sliding window in integers: which keys a query sees, and how many pairs that is. No tensors here.

A query q and a key k of one sequence may attend iff ``q - left <= k <= q + right``. A side of None is
unbounded, a side of 0 admits nothing there. A token always sees itself, so no row is ever empty.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Keys to the left and to the right of a query that it sees, besides its own.

    Raises:
        ValueError: a side is neither None nor an integer of at least 0.
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            side = getattr(self, name)
            if side is not None and (not isinstance(side, int) or isinstance(side, bool) or side < 0):
                raise ValueError(f"window {name} must be None (unbounded) or an integer >= 0, got {side!r}")

    def causal(self) -> "Window":
        """The same window without any key behind the query's own."""
        return Window(self.left, 0)

    def within(self, length: int) -> tuple[int, int]:
        """Both sides as integers below ``length`` that mean the same in sequences up to this length."""
        furthest = max(length - 1, 0)
        left, right = (furthest if side is None else min(side, furthest) for side in (self.left, self.right))
        return left, right

    def allowed_pairs(self, length: int) -> int:
        """Number of (query, key) pairs that attend in a sequence of this length."""
        return length + sum(side * (length - side) + side * (side - 1) // 2 for side in self.within(length))
