"""Guards on what a model made, and the way from pictures to bytes.

Knows: numbers and shapes of frames. Does not know: models or files. A clip that is not finite, has the wrong
size or shows nothing but flat colours is a failure, not a result.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from configs.job import JobFailedError

Frames = NDArray[np.uint8]


def require_finite(tensor: torch.Tensor, what: str, hint: str = "") -> None:
    """Raise JobFailedError("bad_output") if any value is NaN or infinite; the hint ends its message."""
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        bad = int(finite.numel() - finite.sum())
        raise JobFailedError(
            "bad_output", f"{what}: {bad} of {finite.numel()} values are NaN or infinite{hint}"
        )


def to_frames(pictures: torch.Tensor, *, before_frame: Callable[[], None] = lambda: None) -> Frames:
    """Pictures [F, 3, H, W] in 0 to 1 -> frames [F, H, W, 3] of uint8, rounded to nearest."""
    count, channels, height, width = pictures.shape
    frames: Frames = np.empty((count, height, width, channels), np.uint8)
    for frame, picture in zip(frames, pictures, strict=True):
        before_frame()
        frame[:] = _to_frame(picture)
    return frames


def _to_frame(picture: torch.Tensor) -> Frames:
    scaled = (picture.float() * 255).round().to(torch.uint8)
    frame: Frames = scaled.permute(1, 2, 0).cpu().numpy()
    return frame


def require_clip(frames: Frames, num_frames: int, height: int, width: int) -> None:
    """Raise JobFailedError("bad_output") unless count and size are right and some frame shows something."""
    count, *size, _ = frames.shape
    if (count, *size) != (num_frames, height, width):
        raise JobFailedError(
            "bad_output",
            f"the model made {count} frames of {size[1]}x{size[0]}, "
            f"asked were {num_frames} of {width}x{height}",
        )
    corners = frames[:, :1, :1]
    if (frames == corners).all():
        colours = sorted({tuple(int(value) for value in corner) for corner in corners[:, 0, 0]})
        seen = ", ".join(str(colour) for colour in colours[:3]) + (", ..." if len(colours) > 3 else "")
        raise JobFailedError(
            "bad_output", f"every one of the {count} frames is a single flat colour (RGB {seen})"
        )
