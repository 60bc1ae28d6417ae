"""Attention settings: what a server or a request may ask for, and what that resolves to for one clip."""

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

AttentionBackend = Literal["dense", "anchor_local", "window"]
WindowUnit = Literal["frames", "tokens"]
TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountFromZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
DenseSteps = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# A block of two latent frames and an anchor in every 16 tokens is careful: about a fifth of the pairs of a
# clip of 21 latent frames. See docs/attention.md for what other values do to speed and pictures.
AUTO_BLOCK_FRAMES = 2
AUTO_ANCHOR_STRIDE = 16
# A window of an eighth of the clip to either side, and the first frame: a quarter of the pairs of a clip of
# 21 latent frames.
AUTO_WINDOW_SHARE = 8

# Settings that only one backend has; the others are of every sparse backend.
BACKEND_SETTINGS: dict[AttentionBackend, tuple[str, ...]] = {
    "anchor_local": ("block_size", "anchor_stride", "anchor_offset"),
    "window": ("window", "window_unit", "global_frames"),
}


class AttentionConfig(BaseModel):
    """A complete attention setting. ``auto`` values are resolved against the clip's token grid."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: AttentionBackend = "anchor_local"
    block_size: TokenCount | Literal["auto"] = "auto"
    anchor_stride: TokenCount | Literal["auto"] = "auto"
    anchor_offset: CountFromZero = 0
    window: CountFromZero | Literal["auto"] = Field(
        default="auto", description="Of window: units that a token sees to either side of its own."
    )
    window_unit: WindowUnit = Field(
        default="frames", description="What the window counts: latent frames, or tokens."
    )
    global_frames: CountFromZero = Field(
        default=1, description="Of window: latent frames at the start that every token sees."
    )
    dense_steps: DenseSteps = Field(
        default=0.2,
        description="How many early denoise steps run dense: below 1 a fraction of all steps, else a count.",
    )
    dense_layers: tuple[CountFromZero, ...] = ()
    min_tokens: CountFromZero = Field(
        default=1024, description="Clips with fewer tokens than this run dense; the job says so."
    )

    @model_validator(mode="after")
    def _whole_counts(self) -> Self:
        if self.dense_steps >= 1 and self.dense_steps != int(self.dense_steps):
            raise ValueError(
                f"dense_steps={self.dense_steps} is neither a fraction below 1 nor a whole number of steps"
            )
        if self.anchor_stride != "auto" and self.anchor_offset >= self.anchor_stride:
            raise ValueError(
                f"anchor_offset={self.anchor_offset} must be below anchor_stride={self.anchor_stride}"
            )
        return self

    def dense_step_count(self, total_steps: int) -> int:
        """Number of leading steps that run dense; a fraction is rounded up."""
        if self.dense_steps < 1:
            return math.ceil(self.dense_steps * total_steps)
        return min(int(self.dense_steps), total_steps)

    def resolved(self, grid: tuple[int, int, int]) -> "AttentionConfig":
        """Replace ``auto`` by the values for ``grid``, (latent frames, rows, columns) of tokens."""
        frames, rows, columns = grid
        frame = rows * columns
        found: dict[str, int] = {}
        if self.backend == "anchor_local":
            if self.block_size == "auto":
                found["block_size"] = AUTO_BLOCK_FRAMES * frame
            if self.anchor_stride == "auto":
                found["anchor_stride"] = _spread_stride(frame)
        if self.backend == "window" and self.window == "auto":
            window = max(1, frames // AUTO_WINDOW_SHARE)
            found["window"] = window if self.window_unit == "frames" else window * frame
        # model_copy does not validate, and the offset must be checked against the stride that will run.
        return AttentionConfig.model_validate(self.model_dump() | found)


def _spread_stride(tokens_per_frame: int) -> int:
    """Smallest stride from AUTO_ANCHOR_STRIDE that shares no factor with the frame.

    A stride that divides the row width puts every anchor into the same few columns (stride 16 at width 80:
    five of them); one that is coprime to the frame visits all rows and columns in turn.
    """
    stride = AUTO_ANCHOR_STRIDE
    while math.gcd(stride, tokens_per_frame) != 1:
        stride += 1
    return stride


class AttentionOverrides(BaseModel):
    """What a request, a flag or the environment says about attention; the rest keeps its base value."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: AttentionBackend | None = None
    block_size: TokenCount | Literal["auto"] | None = None
    anchor_stride: TokenCount | Literal["auto"] | None = None
    anchor_offset: CountFromZero | None = None
    window: CountFromZero | Literal["auto"] | None = None
    window_unit: WindowUnit | None = None
    global_frames: CountFromZero | None = None
    dense_steps: DenseSteps | None = None
    dense_layers: tuple[CountFromZero, ...] | None = None
    min_tokens: CountFromZero | None = None

    def over(self, base: AttentionConfig) -> AttentionConfig:
        """Base with these values on top.

        Raises:
            ValueError: a setting that the resulting backend does not have (it would have no effect), or the
                combination is invalid.
        """
        said = self.model_dump(exclude_none=True)
        backend = said.get("backend", base.backend)
        foreign = {name for other, names in BACKEND_SETTINGS.items() if other != backend for name in names}
        unused = sorted(set(said) - {"backend"} if backend == "dense" else set(said) & foreign)
        if unused:
            raise ValueError(f"{', '.join(unused)} has no effect with backend={backend}; leave it out")
        return AttentionConfig.model_validate(base.model_dump() | said)
