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


def require_finite(tensor: torch.Tensor, what: str) -> None:
    """Raise JobFailedError("bad_output") if any value is NaN or infinite."""
    _require_none(int(_infinite(tensor)), tensor.numel(), what)


class Leaving:
    """Pictures [F, 3, H, W] in 0 to 1 on their way from the device, where they are rounded to bytes.

    Nobody waits for them here, so that the device may go on with the next ones; ``frames`` waits.
    ``before_frame`` is called before each of them; the hint ends the message of a failure.
    """

    def __init__(
        self, pictures: torch.Tensor, *, hint: str = "", before_frame: Callable[[], None] = lambda: None
    ) -> None:
        count, channels, height, width = pictures.shape
        self._hint, self._values = hint, pictures.numel()
        is_gpu = pictures.is_cuda
        # Copies go on beside the processor into pinned memory only.
        self._infinite = torch.empty((), dtype=torch.int64, pin_memory=is_gpu)
        self._frames = torch.empty((count, height, width, channels), dtype=torch.uint8, pin_memory=is_gpu)
        self._infinite.copy_(_infinite(pictures), non_blocking=True)
        for frame, picture in zip(self._frames, pictures, strict=True):
            before_frame()
            frame.copy_(_to_frame(picture), non_blocking=True)
        self._here = torch.cuda.Event() if is_gpu else None
        if self._here is not None:
            self._here.record(torch.cuda.current_stream(pictures.device))

    @property
    def are_here(self) -> bool:
        """Whether nobody has to wait for them."""
        return self._here is None or self._here.query()

    def frames(self) -> Frames:
        """[F, H, W, 3].

        Raises:
            JobFailedError: ``bad_output``: values are NaN or infinite.
        """
        if self._here is not None:
            self._here.synchronize()
        _require_none(int(self._infinite), self._values, "decoded pictures", self._hint)
        frames: Frames = self._frames.numpy()
        return frames


def _infinite(tensor: torch.Tensor) -> torch.Tensor:
    """How many values are NaN or infinite."""
    return torch.isfinite(tensor).logical_not_().sum()


def _require_none(bad: int, values: int, what: str, hint: str = "") -> None:
    if bad:
        raise JobFailedError("bad_output", f"{what}: {bad} of {values} values are NaN or infinite{hint}")


def _to_frame(picture: torch.Tensor) -> torch.Tensor:
    scaled = (picture.float() * 255).round().to(torch.uint8)
    return scaled.permute(1, 2, 0).contiguous()  # here, and not where it goes: a processor takes long for it


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
