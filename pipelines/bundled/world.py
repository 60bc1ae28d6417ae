"""The synthetic world of the bundled model: what a clip can show, and what training never sees.

Knows the tables of colours, shapes, motions and backgrounds. Does not know drawing (`drawing`), words
(`prompts`) or reading frames back (`read_back`).
"""

import hashlib
import itertools
from dataclasses import dataclass
from functools import cache

Rgb = tuple[float, float, float]

COLORS: dict[str, Rgb] = {
    "red": (0.86, 0.08, 0.10),
    "green": (0.10, 0.72, 0.20),
    "blue": (0.15, 0.30, 0.95),
    "yellow": (0.97, 0.90, 0.15),
    "purple": (0.60, 0.15, 0.75),
    "orange": (0.98, 0.48, 0.05),
    "cyan": (0.15, 0.85, 0.92),
    "pink": (0.98, 0.55, 0.78),
}
BACKGROUNDS: dict[str, Rgb] = {
    "black": (0.03, 0.03, 0.03),
    "white": (0.97, 0.97, 0.97),
    "grey": (0.50, 0.50, 0.50),
    "teal": (0.05, 0.45, 0.48),
    "brown": (0.38, 0.22, 0.10),
}
SHAPES = ("circle", "square", "triangle", "ring")
# Unit steps in image coordinates: x to the right, y downwards.
DIRECTIONS: dict[str, tuple[float, float]] = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
}
# Way of the centre over the whole clip, as a fraction of the frame's short side.
SPEEDS: dict[str, float] = {"slowly": 0.22, "quickly": 0.46}

HELD_OUT_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class ClipSpec:
    """One combination of the five attributes; the values are keys of the tables above."""

    color: str
    shape: str
    direction: str
    speed: str
    background: str


@cache
def all_specs() -> tuple[ClipSpec, ...]:
    """Every combination, in a fixed order."""
    return tuple(
        itertools.starmap(ClipSpec, itertools.product(COLORS, SHAPES, DIRECTIONS, SPEEDS, BACKGROUNDS))
    )


def is_held_out(spec: ClipSpec) -> bool:
    """Whether training never sees this combination: about a quarter, by a hash that never changes."""
    text = f"{spec.color} {spec.shape} {spec.direction} {spec.speed} {spec.background}"
    return hashlib.sha256(text.encode()).digest()[0] < HELD_OUT_SHARE * 256


@cache
def trained_specs() -> tuple[ClipSpec, ...]:
    return tuple(spec for spec in all_specs() if not is_held_out(spec))


@cache
def held_out_specs() -> tuple[ClipSpec, ...]:
    """The combinations of the score, shuffled by hash so that any first n of them are a fair sample."""
    held_out = (spec for spec in all_specs() if is_held_out(spec))
    return tuple(sorted(held_out, key=lambda spec: hashlib.sha256(repr(spec).encode()).digest()))
