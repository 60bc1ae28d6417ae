"""The words of the bundled model: one canonical sentence a clip, other ways to say it, the way back.

Knows the grammar and its vocabulary. Does not know pictures or tokenizer files.
"""

import random
import re

from pipelines.bundled.world import BACKGROUNDS, COLORS, DIRECTIONS, SHAPES, SPEEDS, ClipSpec

# Ways to say a value; the first is the canonical one. The shared words of a phrase ("to the") carry nothing.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "disc", "ball"),
    "square": ("square", "box"),
    "ring": ("ring", "hoop"),
    "left": ("left", "leftwards", "to the left"),
    "right": ("right", "rightwards", "to the right"),
    "up": ("up", "upwards"),
    "down": ("down", "downwards"),
    "slowly": ("slowly", "slow"),
    "quickly": ("quickly", "fast", "rapidly"),
    "purple": ("purple", "violet"),
    "grey": ("grey", "gray"),
}
TEMPLATES = (
    "a {color} {shape} moving {direction} {speed} on a {background} background",
    "a {color} {shape} moves {direction} {speed} on a {background} background",
    "{color} {shape} moving {speed} {direction}, {background} background",
    "a {shape} that is {color} goes {direction} {speed} on {background}",
    "on a {background} background, a {color} {shape} moves {speed} {direction}",
    "{background} background: {color} {shape} going {speed} {direction}",
    "the {color} {shape} slides {speed} {direction} over a {background} background",
    "a video of a {color} {shape} moving {direction} {speed} in front of a {background} background",
)
# The same sentence with one attribute left out; the clip then shows any value of it.
SHORTER_TEMPLATES = (
    "a {shape} moving {direction} {speed} on a {background} background",
    "something {color} moving {direction} {speed} on a {background} background",
    "a {color} {shape} moving {speed} on a {background} background",
    "a {color} {shape} moving {direction} on a {background} background",
    "a {color} {shape} moving {direction} {speed}",
)
SHORTER_SHARE = 0.15
_WORD = re.compile(r"[a-z]+")


def prompt(spec: ClipSpec) -> str:
    """The canonical sentence: "a red circle moving left quickly on a white background"."""
    return TEMPLATES[0].format(**_values(spec))


def varied_prompt(spec: ClipSpec, rng: random.Random) -> str:
    """Another sentence for the same clip: word order, synonyms, and now and then an attribute left out."""
    template = rng.choice(SHORTER_TEMPLATES if rng.random() < SHORTER_SHARE else TEMPLATES)
    said = {name: rng.choice(SYNONYMS.get(value, (value,))) for name, value in _values(spec).items()}
    return template.format(**said)


def spec_from_prompt(text: str) -> ClipSpec | None:
    """The clip that a prompt asks for, or None where an attribute is missing or has two values."""
    found: dict[str, set[str]] = {name: set() for name in _TABLES}
    for word in _WORD.findall(text.lower()):
        if word in _MEANINGS:
            attribute, value = _MEANINGS[word]
            found[attribute].add(value)
    if any(len(values) != 1 for values in found.values()):
        return None
    return ClipSpec(**{name: values.pop() for name, values in found.items()})


def vocabulary() -> tuple[str, ...]:
    """Every word of the grammar, sorted."""
    filler = {word for template in TEMPLATES + SHORTER_TEMPLATES for word in _words_outside_fields(template)}
    spoken = {word for way in SYNONYMS.values() for phrase in way for word in phrase.split()}
    values = {value for table in _TABLES.values() for value in table}
    return tuple(sorted(filler | spoken | values))


def _values(spec: ClipSpec) -> dict[str, str]:
    return {name: getattr(spec, name) for name in _TABLES}


def _words_outside_fields(template: str) -> list[str]:
    return _WORD.findall(re.sub(r"\{\w+\}", " ", template))


_TABLES: dict[str, tuple[str, ...]] = {
    "color": tuple(COLORS),
    "shape": SHAPES,
    "direction": tuple(DIRECTIONS),
    "speed": tuple(SPEEDS),
    "background": tuple(BACKGROUNDS),
}
_MEANINGS: dict[str, tuple[str, str]] = {
    phrase.split()[-1]: (attribute, value)
    for attribute, table in _TABLES.items()
    for value in table
    for phrase in SYNONYMS.get(value, (value,))
}
