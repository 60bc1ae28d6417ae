"""Draws a step's profile: one bar cut by kind, and the kernels that took longest.

Knows: SVG. Does not know: how a profile is made.
"""

from html import escape

from pipelines.profiling import KINDS, Entry, Kind, StepProfile

WIDTH, MARGIN, ROW, BAR = 900, 20, 20, 40
NAME_WIDTH, NAME_CHARACTERS = 420, 60
ROWS = 20
COLOURS: dict[Kind, str] = {
    "attention": "#4678c8",
    "linear": "#f09628",
    "elementwise": "#5aa05a",
    "other": "#969696",
}


def drawn(profile: StepProfile) -> str:
    """The profile as an SVG document."""
    top = profile.top[:ROWS]
    height = 2 * MARGIN + 3 * ROW + BAR + ROW + len(top) * ROW + ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(MARGIN, MARGIN + ROW / 2, _title(profile)),
        *_bar(profile, MARGIN + ROW),
        *_legend(profile, MARGIN + ROW + BAR + ROW),
        *_rows(top, MARGIN + 3 * ROW + BAR + ROW),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _title(profile: StepProfile) -> str:
    return (
        f"{profile.model}, {profile.num_frames} frames of {profile.width}x{profile.height}, "
        f"{profile.attention.backend}, {profile.device}, {profile.dtype}: one step {profile.seconds:.3f} s, "
        f"peak {profile.peak_memory_bytes / 2**30:.2f} GiB"
    )


def _bar(profile: StepProfile, y: float) -> list[str]:
    scale = (WIDTH - 2 * MARGIN) / (profile.kernel_seconds or 1.0)
    parts, x = [], float(MARGIN)
    for kind in KINDS:
        width = profile.seconds_by_kind[kind] * scale
        parts.append(_box(x, y, width, BAR, COLOURS[kind]))
        x += width
    return parts


def _legend(profile: StepProfile, y: float) -> list[str]:
    parts = []
    for index, kind in enumerate(KINDS):
        x = MARGIN + index * (WIDTH - 2 * MARGIN) / len(KINDS)
        share = profile.seconds_by_kind[kind] / (profile.kernel_seconds or 1.0)
        parts.append(_box(x, y - 10, 10, 10, COLOURS[kind]))
        parts.append(_text(x + 15, y, f"{kind} {profile.seconds_by_kind[kind]:.4f} s, {share:.0%}"))
    return parts


def _rows(top: list[Entry], y: float) -> list[str]:
    longest = max((entry.seconds for entry in top), default=1.0) or 1.0
    scale = (WIDTH - 2 * MARGIN - NAME_WIDTH - 130) / longest
    parts = []
    for index, entry in enumerate(top):
        at, width = y + index * ROW, entry.seconds * scale
        name = entry.name if len(entry.name) <= NAME_CHARACTERS else entry.name[: NAME_CHARACTERS - 1] + "…"
        parts.append(_text(MARGIN, at + 10, name))
        parts.append(_box(MARGIN + NAME_WIDTH, at, width, ROW - 6, COLOURS[entry.kind]))
        parts.append(
            _text(MARGIN + NAME_WIDTH + width + 5, at + 10, f"{entry.seconds:.4f} s, {entry.calls} calls")
        )
    return parts


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
