"""The sizes and lengths that a model can make, and how many tokens they cost."""

import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Diffusers' WanPipeline refuses other sides, even where its VAE and its patches could make them.
PIPELINE_SIDE_MULTIPLE = 16
Positive = Annotated[int, Field(ge=1)]


class GeometryError(ValueError):
    """A size or length that the model cannot make; the message names the nearest ones that it can.

    ``field`` is the request field at fault (``size``, ``num_frames``, ...).
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class VideoGeometry(BaseModel):
    """Compression of the VAE and patch size of the transformer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vae_spatial: Positive = 8
    vae_temporal: Positive = 4
    patch: tuple[Positive, Positive, Positive] = (1, 2, 2)

    @property
    def side_multiple(self) -> int:
        """Width and height must be a multiple of this many pixels."""
        return math.lcm(PIPELINE_SIDE_MULTIPLE, self.vae_spatial * max(self.patch[1], self.patch[2]))

    def check_side(self, name: str, pixels: int) -> None:
        """Raise GeometryError unless ``pixels`` is a multiple of ``side_multiple``."""
        step = self.side_multiple
        if pixels >= step and pixels % step == 0:
            return
        low = max(step, pixels // step * step)
        near = f"{step}" if pixels < step else f"{low} or {low + step}"
        raise GeometryError("size", f"{name} {pixels} is not a multiple of {step}; nearest valid: {near}")

    def check_frames(self, num_frames: int) -> None:
        """Raise GeometryError unless ``num_frames`` is 1 + a multiple of the VAE's time compression."""
        step = self.vae_temporal
        if num_frames >= 1 and (num_frames - 1) % step == 0:
            return
        low = 1 if num_frames < 1 else (num_frames - 1) // step * step + 1
        near = "1" if num_frames < 1 else f"{low} or {low + step}"
        raise GeometryError(
            "num_frames", f"num_frames {num_frames} is not of the form {step}k+1; nearest valid: {near}"
        )

    def frames_for_seconds(self, seconds: float, fps: int) -> int:
        """The valid frame count whose length is nearest to ``seconds`` at ``fps`` (at least one frame)."""
        return max(0, round((seconds * fps - 1) / self.vae_temporal)) * self.vae_temporal + 1

    def token_grid(self, width: int, height: int, num_frames: int) -> tuple[int, int, int]:
        """Tokens along (time, height, width) of the transformer's sequence."""
        latent_frames = (num_frames - 1) // self.vae_temporal + 1
        return (
            latent_frames // self.patch[0],
            height // self.vae_spatial // self.patch[1],
            width // self.vae_spatial // self.patch[2],
        )
