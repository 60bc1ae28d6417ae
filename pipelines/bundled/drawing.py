"""Draws clips of the synthetic world: anti-aliased, from signed distances, whole batches on any device.

Knows the geometry of shapes and paths. Does not know words, models or files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelines.bundled.world import BACKGROUNDS, COLORS, DIRECTIONS, SHAPES, SPEEDS, ClipSpec, Rgb

RADIUS_RANGE = (0.15, 0.20)
RING_HOLE = 0.5
# Bounding circle of the largest shape (the apex of the triangle, 1.05) in radii, with room for its soft edge.
REACH = 1.2


@dataclass(frozen=True, slots=True)
class Motion:
    """Where and how large shapes are, in short sides: centre half-way [B, 2] (x, y), radius [B]."""

    centre: Tensor
    radius: Tensor


def render(
    specs: Sequence[ClipSpec],
    generator: torch.Generator,
    *,
    height: int,
    width: int,
    num_frames: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw one clip per spec; size and path are drawn from ``generator`` (a CPU one), the path stays inside.

    Returns:
        float32 [B, 3, T, H, W] in [-1, 1], anti-aliased.
    """
    short = min(height, width)
    motion = sample_motion(specs, generator, extent=(width / short, height / short))
    return draw(
        specs, motion, height=height, width=width, num_frames=num_frames, short_side=short, device=device
    )


def sample_motion(
    specs: Sequence[ClipSpec], generator: torch.Generator, extent: tuple[float, float] = (1.0, 1.0)
) -> Motion:
    """Random radius and path for each spec in a frame of ``extent`` (width, height) short sides."""
    radius_draw, *centre_draw = torch.rand(3, len(specs), generator=generator)
    smallest, largest = RADIUS_RANGE
    radius = smallest + (largest - smallest) * radius_draw
    half_path = _travel(specs).abs() / 2
    margin = REACH * radius[:, None] + half_path
    free = torch.tensor(extent) - 2 * margin
    return Motion(margin + free * torch.stack(centre_draw, dim=1), radius)


def draw(
    specs: Sequence[ClipSpec],
    motion: Motion,
    *,
    height: int,
    width: int,
    num_frames: int,
    short_side: int,
    device: torch.device | str = "cpu",
    origin: Tensor | None = None,
) -> Tensor:
    """Rasterise clips, or windows of ``height`` x ``width`` pixels with corner ``origin`` [B, 2] (x, y).

    ``short_side`` is the number of pixels that one unit of ``motion`` spans; ``origin`` is in those units.

    Returns:
        float32 [B, 3, T, H, W] in [-1, 1].
    """
    progress = torch.linspace(-0.5, 0.5, num_frames)
    centre = motion.centre[:, None] + _travel(specs)[:, None] * progress[:, None]
    if origin is not None:
        centre = centre - origin[:, None]
    centre = centre.to(device)[..., None, None]
    x = ((torch.arange(width, device=device) + 0.5) / short_side)[None, None, None, :] - centre[:, :, 0]
    y = ((torch.arange(height, device=device) + 0.5) / short_side)[None, None, :, None] - centre[:, :, 1]
    shape = _table_index(specs, "shape", SHAPES).to(device)[:, None, None, None]
    distance = _signed_distance(x, y, motion.radius.to(device)[:, None, None, None], shape)
    coverage = (0.5 - distance * short_side).clamp_(0, 1)[:, None]
    paint = _rgb(specs, "color", COLORS).to(device)
    ground = _rgb(specs, "background", BACKGROUNDS).to(device)
    return torch.lerp(ground, paint, coverage).mul_(2).sub_(1)


def _signed_distance(x: Tensor, y: Tensor, radius: Tensor, shape: Tensor) -> Tensor:
    """Distance to the outline, negative inside: x [B, T, 1, W], y [B, T, H, 1], others [B, 1, 1, 1]."""
    from_centre = torch.sqrt(x * x + y * y)
    circle = from_centre - radius
    square = torch.maximum(x.abs(), y.abs()) - 0.88 * radius
    size = 1.05 * radius
    triangle = torch.maximum(y - 0.8 * size, (2 * x.abs() - (y + size)) / math.sqrt(5))
    ring = torch.maximum(circle, RING_HOLE * radius - from_centre)
    distance = torch.where(shape == SHAPES.index("square"), square, circle)
    distance = torch.where(shape == SHAPES.index("triangle"), triangle, distance)
    return torch.where(shape == SHAPES.index("ring"), ring, distance)


def _travel(specs: Sequence[ClipSpec]) -> Tensor:
    """Way of the centre over the whole clip: [B, 2] in short sides."""
    ways = [[step * SPEEDS[spec.speed] for step in DIRECTIONS[spec.direction]] for spec in specs]
    return torch.tensor(ways)


def _table_index(specs: Sequence[ClipSpec], attribute: str, table: Sequence[str]) -> Tensor:
    return torch.tensor([table.index(getattr(spec, attribute)) for spec in specs])


def _rgb(specs: Sequence[ClipSpec], attribute: str, table: dict[str, Rgb]) -> Tensor:
    return torch.tensor([table[getattr(spec, attribute)] for spec in specs])[:, :, None, None, None]
