"""What a clip shows, read from its frames with numpy alone, and the prompt-following score made of it.

Knows pixels and the world's tables of values. Does not know how clips are drawn, generated or stored.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.bundled.world import BACKGROUNDS, COLORS, SPEEDS, ClipSpec, Rgb

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]

ATTRIBUTES = ("color", "shape", "direction", "speed", "background")

# Distances in RGB with channels in [0, 1]: beyond COLOR_TOLERANCE a colour is none of the table's, below
# MIN_CONTRAST there is no object before the background.
COLOR_TOLERANCE = 0.25
MIN_CONTRAST = 0.2
# A share of the frame that the smallest shape (a triangle, 4%) certainly fills.
SOLID_SHARE = 0.01
MIN_AREA = 0.01
# Way of the centre over the clip in short sides: below STILL nothing moves, FAR is beyond every speed.
STILL = 0.1
FAR = 0.65
SPEED_BORDER = sum(SPEEDS.values()) / len(SPEEDS)


@dataclass(frozen=True, slots=True)
class ReadBack:
    """The attributes one can see (None: not one of the world's values), and two measurements behind them.

    ``displacement`` is the way of the centre over the clip (x, y) in short sides; ``area`` the object's mean
    share of the frame.
    """

    color: str | None
    shape: str | None
    direction: str | None
    speed: str | None
    background: str | None
    displacement: tuple[float, float]
    area: float


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of clips in [0, 1] on which one attribute, or all five, are as asked."""

    color: float
    shape: float
    direction: float
    speed: float
    background: float
    all_five: float
    clips: int


def read_attributes(frames: NDArray[np.uint8] | NDArray[np.floating]) -> ReadBack:
    """Read a clip [T, H, W, 3], uint8 or float in [0, 1].

    Raises:
        ValueError: the array has another shape.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3:
        raise ValueError(f"frames has shape {frames.shape}; expected [frames, height, width, 3]")
    scale = 255 if np.issubdtype(frames.dtype, np.integer) else 1
    clip = _smooth(frames.astype(np.float32) / np.float32(scale))
    ground = _border_color(clip)
    background = _nearest(ground, BACKGROUNDS)
    paint = _object_color(clip, ground)
    if paint is None:
        return ReadBack(None, None, None, None, background, (0.0, 0.0), 0.0)
    mask = _object_mask(clip, ground, paint)
    area = mask.mean(axis=(1, 2))
    color = _nearest(paint, COLORS)
    if area.min() < MIN_AREA:
        return ReadBack(color, None, None, None, background, (0.0, 0.0), float(area.mean()))
    displacement = _displacement(mask)
    direction, speed = _motion(displacement)
    return ReadBack(color, _shape(mask), direction, speed, background, displacement, float(area.mean()))


def score(specs: Sequence[ClipSpec], clips: Iterable[NDArray[np.uint8] | NDArray[np.floating]]) -> Score:
    """Compare each clip with what was asked of it.

    Raises:
        ValueError: there are no clips, or not as many as specs.
    """
    return score_read_backs(specs, [read_attributes(clip) for clip in clips])


def score_read_backs(specs: Sequence[ClipSpec], seen: Sequence[ReadBack]) -> Score:
    """As `score`, for clips that are read already."""
    if not specs or len(specs) != len(seen):
        raise ValueError(f"{len(seen)} clips for {len(specs)} specs; expected one each, and at least one")
    right = np.array(
        [
            [getattr(got, name) == getattr(spec, name) for name in ATTRIBUTES]
            for spec, got in zip(specs, seen, strict=True)
        ]
    )
    each = dict(zip(ATTRIBUTES, right.mean(axis=0).tolist(), strict=True))
    return Score(**each, all_five=float(right.all(axis=1).mean()), clips=len(specs))


def _smooth(clip: Floats) -> Floats:
    """3x3 box mean inside each frame: pixel noise falls to a third, edges move by less than a pixel."""
    for axis in (1, 2):
        padding = [(0, 0)] * 4
        padding[axis] = (1, 1)
        padded = np.pad(clip, padding, mode="edge")
        length = clip.shape[axis]
        clip = sum(np.take(padded, range(k, k + length), axis=axis) for k in range(3)) / np.float32(3)  # type: ignore[assignment]
    return clip


def _border_color(clip: Floats) -> Floats:
    rows = clip[:, [0, 1, -2, -1]].reshape(-1, 3)
    columns = clip[:, :, [0, 1, -2, -1]].reshape(-1, 3)
    return np.median(np.concatenate([rows, columns]), axis=0)  # type: ignore[no-any-return]


def _object_color(clip: Floats, ground: Floats) -> Floats | None:
    """Median colour of the pixels farthest from the background, or None where nothing stands out."""
    distance = np.linalg.norm(clip - ground, axis=-1)
    solid = np.quantile(distance, 1 - SOLID_SHARE)
    if solid < MIN_CONTRAST:
        return None
    return np.median(clip[distance > 0.75 * solid], axis=0)  # type: ignore[no-any-return]


def _object_mask(clip: Floats, ground: Floats, paint: Floats) -> Mask:
    """Pixels [T, H, W] that are nearer to the object's colour than to the background."""
    axis = paint - ground
    return (clip - ground) @ axis > 0.5 * float(axis @ axis)


def _nearest(color: Floats, table: Mapping[str, Rgb]) -> str | None:
    distances = {name: float(np.linalg.norm(np.asarray(rgb) - color)) for name, rgb in table.items()}
    name = min(distances, key=distances.__getitem__)
    return name if distances[name] < COLOR_TOLERANCE else None


def _displacement(mask: Mask) -> tuple[float, float]:
    """Way of the centroid over the clip by a straight line fitted through all frames, in short sides."""
    frames, height, width = mask.shape
    count = mask.sum(axis=(1, 2))
    x = (mask.sum(axis=1) @ np.arange(width)) / count
    y = (mask.sum(axis=2) @ np.arange(height)) / count
    time = np.linspace(-0.5, 0.5, frames)
    slope = time / float(time @ time)
    short = min(height, width)
    return float(slope @ x) / short, float(slope @ y) / short


def _motion(displacement: tuple[float, float]) -> tuple[str | None, str | None]:
    along, across = sorted(displacement, key=abs, reverse=True)
    if not STILL < abs(along) < FAR or abs(across) > abs(along) / 2:
        return None, None
    names = ("left", "right") if abs(displacement[0]) > abs(displacement[1]) else ("up", "down")
    return names[along > 0], "quickly" if abs(along) > SPEED_BORDER else "slowly"


def _shape(mask: Mask) -> str | None:
    """Median over the frames of how the object fills its bounding box decides the shape."""
    features = np.median([_box_features(frame) for frame in mask], axis=0)
    fill, top, middle = (float(value) for value in features)
    if middle < 0.5:
        return "ring"
    if top < 0.4:
        return "triangle"
    return "square" if fill > 0.9 else "circle"


def _box_features(frame: Mask) -> tuple[float, float, float]:
    """Of an object [H, W]: filled share of its box, its share in the upper half, filled share of the core."""
    top, bottom = _extent(frame.sum(axis=1))
    left, right = _extent(frame.sum(axis=0))
    box = frame[top:bottom, left:right]
    height, width = box.shape
    upper = box[: height // 2].sum() + (height % 2) * box[height // 2].sum() / 2
    y, x = round(0.38 * height), round(0.38 * width)
    middle = box[y : height - y, x : width - x]
    return float(box.mean()), float(upper / box.sum()), float(middle.mean())


def _extent(profile: NDArray[np.intp]) -> tuple[int, int]:
    """Where the middle 98% of an object's pixels lie along one axis: half-open range."""
    share = np.cumsum(profile) / profile.sum()
    first = int(np.searchsorted(share, 0.01))
    last = int(np.searchsorted(share, 0.99))
    return first, last + 1
