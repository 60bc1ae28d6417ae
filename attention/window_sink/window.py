"""The sliding window in integers: which keys a query sees, and how many pairs that is. No tensors here.

A query q and a key k of one sequence may attend iff

    -left <= k // unit - q // unit <= right  or  k < global_keys  or  q < global_queries

and, if ``causal``, also ``k <= q``. A side of None is unbounded, a side of 0 admits nothing there. A token
always sees itself, so no row is ever empty.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Bounds:
    """A window with all its numbers as integers that fit the positions of one sequence."""

    left: int
    right: int
    unit: int
    global_keys: int
    global_queries: int
    causal: bool

    @property
    def is_plain(self) -> bool:
        """Whether a query at position q sees exactly q - left .. q + right, as far as there are keys."""
        return self.unit == 1 and not self.global_keys and not self.global_queries

    def keys_of(self, first: int, last: int, length: int) -> tuple[int, int]:
        """Begin and end of the keys in the window of any query first .. last, globals left out."""
        begin = max((first // self.unit - self.left) * self.unit, 0)
        end = min((last // self.unit + self.right + 1) * self.unit, length)
        return begin, min(end, last + 1) if self.causal else end


@dataclass(frozen=True, slots=True)
class Window:
    """Units of tokens to the left and to the right of a query's own that it sees, and what all see.

    Attributes:
        left, right: in units; None is unbounded.
        unit: tokens that share one window, such as those of a latent frame.
        global_keys: the first keys of a sequence, seen by every query.
        global_queries: the first queries of a sequence, which see every key.
        causal: no query sees a key behind its own, whatever the rest says.

    Raises:
        ValueError: a value is out of range.
    """

    left: int | None
    right: int | None
    unit: int = 1
    global_keys: int = 0
    global_queries: int = 0
    causal: bool = False

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            side = getattr(self, name)
            if side is not None and not is_count(side):
                raise ValueError(f"window {name} must be None (unbounded) or an integer >= 0, got {side!r}")
        for name, least in (("unit", 1), ("global_keys", 0), ("global_queries", 0)):
            value = getattr(self, name)
            if not is_count(value) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")

    @classmethod
    def of_clip(
        cls,
        sides: tuple[int | None, int | None],
        unit: Literal["frames", "tokens"],
        global_frames: int,
        frame_tokens: int,
    ) -> "Window":
        """A window over a clip whose tokens lie frame by frame, ``frame_tokens`` each."""
        left, right = sides
        return cls(
            left,
            right,
            unit=frame_tokens if unit == "frames" else 1,
            global_keys=global_frames * frame_tokens,
        )

    def within(self, length: int) -> Bounds:
        """The same window as numbers of about ``length`` that mean the same in sequences up to it."""
        unit = min(self.unit, max(length, 1))
        furthest = max(length - 1, 0) // unit
        left, right = (furthest if side is None else min(side, furthest) for side in (self.left, self.right))
        return Bounds(
            left=left,
            right=0 if self.causal else right,
            unit=unit,
            global_keys=min(self.global_keys, length),
            global_queries=min(self.global_queries, length),
            causal=self.causal,
        )

    def allowed_pairs(self, length: int) -> int:
        """Number of (query, key) pairs that attend in a sequence of this length. Costs no loop."""
        bounds = self.within(length)
        keys, queries = bounds.global_keys, bounds.global_queries
        pairs = _in_window(bounds, length, length)
        # Pairs with a global end, each once, that are not in the window.
        for some_queries, some_keys, sign in ((length, keys, 1), (queries, length, 1), (queries, keys, -1)):
            every = _all(bounds, some_queries, some_keys)
            pairs += sign * (every - _in_window(bounds, some_queries, some_keys))
        return pairs


def is_count(value: object) -> bool:
    """Whether it is an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _all(bounds: Bounds, queries: int, keys: int) -> int:
    """Pairs of the first queries and the first keys; if causal, without those whose key is behind."""
    if not bounds.causal:
        return queries * keys
    keys = min(keys, queries)
    return queries * keys - keys * (keys - 1) // 2


def _in_window(bounds: Bounds, queries: int, keys: int) -> int:
    """Pairs of the first queries and the first keys that the window admits, globals apart."""
    unit = bounds.unit
    if bounds.causal:
        keys = min(keys, queries)
        whole, rest = divmod(keys, unit)
        behind = whole * (unit * (unit - 1) // 2) + rest * (rest - 1) // 2  # in a query's own unit
        return _band(queries, keys, bounds.left, 0, unit) - behind
    if keys > queries:
        return _band(keys, queries, bounds.right, bounds.left, unit)
    return _band(queries, keys, bounds.left, bounds.right, unit)


def _band(queries: int, keys: int, left: int, right: int, unit: int) -> int:
    """Pairs of the first queries and the first keys, no more than queries, within the sides."""
    whole, rest = divmod(keys, unit)
    # Key unit j is seen by the queries from max(j - right, 0) * unit to min((j + left + 1) * unit, queries).
    cut_at = min(max(queries // unit - left, 0), whole)  # from this unit on, ends are cut
    ends = unit * (cut_at * (left + 1) + cut_at * (cut_at - 1) // 2) + (whole - cut_at) * queries
    late = max(whole - 1 - right, 0)
    begins = unit * (late * (late + 1) // 2)
    last_end, last_begin = min((whole + left + 1) * unit, queries), max(whole - right, 0) * unit
    return unit * (ends - begins) + rest * (last_end - last_begin)
