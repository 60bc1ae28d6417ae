"""Lines over logarithmic axes as an SVG file, so that a plot needs no plotting library.

Knows points and labels. Does not know what they measure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 280
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 44
COLOURS = ("#4477aa", "#999999", "#cc3311", "#ee9933", "#228833", "#aa3377")


@dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y), both positive."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines that share two axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]


def svg(panels: Sequence[Panel]) -> str:
    """The panels side by side."""
    drawn = "".join(
        f'<g transform="translate({number * WIDTH},0)">{_panel(panel)}</g>'
        for number, panel in enumerate(panels)
    )
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">'
        f'<rect width="100%" height="100%" fill="white"/>{drawn}</svg>\n'
    )


def _panel(panel: Panel) -> str:
    points = [point for line in panel.lines for point in line.points]
    to_x = _scale([x for x, _ in points], LEFT, WIDTH - RIGHT)
    to_y = _scale([y for _, y in points], HEIGHT - BOTTOM, TOP)
    parts = [
        _text(WIDTH / 2, 16, panel.title),
        _text(WIDTH / 2, HEIGHT - 8, panel.x_label),
        _text(16, TOP - 6, panel.y_label),
        f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="black"/>',
    ]
    parts += [_text(to_x(x), HEIGHT - BOTTOM + 14, _short(x)) for x in sorted({x for x, _ in points})]
    for y in _ticks([y for _, y in points]):
        parts.append(_text(LEFT - 20, to_y(y) + 3, f"{y:g}"))
        parts.append(f'<path d="M{LEFT} {to_y(y):.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
    for number, line in enumerate(panel.lines):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        at = TOP + 12 + 13 * number
        parts.append(f'<text x="{LEFT + 8}" y="{at}" fill="{colour}">{escape(line.name)}</text>')
    return "".join(parts)


class _Scale:
    """A logarithmic axis from pixel to pixel."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self._low, self._span = math.log(low), math.log(high / low) or 1.0
        self._begin, self._length = begin, end - begin

    def __call__(self, value: float) -> float:
        return self._begin + self._length * (math.log(value) - self._low) / self._span


def _scale(values: list[float], begin: float, end: float) -> _Scale:
    return _Scale(min(values), max(values), begin, end)


def _ticks(values: list[float]) -> list[float]:
    """Powers of ten and their doubles and fives within the values."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    found = [step * 10.0**power for power in range(first, last + 1) for step in (1, 2, 5)]
    return [tick for tick in found if min(values) <= tick <= max(values)]


def _short(value: float) -> str:
    return f"{value / 1000:.3g}k" if value >= 10_000 else f"{value:g}"


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>'
