"""Attention settings: what a server or a request may ask for, and what that resolves to for one clip."""

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

AttentionBackend = Literal["dense", "anchor_local"]
TokenCount = Annotated[int, Field(ge=1, le=2**31 - 1)]
CountFromZero = Annotated[int, Field(ge=0, le=2**31 - 1)]
DenseSteps = Annotated[float, Field(ge=0, allow_inf_nan=False)]

# A block of two latent frames and an anchor in every 16 tokens is careful: about a fifth of the pairs of a
# clip of 21 latent frames. See docs/attention.md for what other values do to speed and pictures.
AUTO_BLOCK_FRAMES = 2
AUTO_ANCHOR_STRIDE = 16


class AttentionConfig(BaseModel):
    """A complete attention setting. ``auto`` values are resolved against the clip's token grid."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: AttentionBackend = "anchor_local"
    block_size: TokenCount | Literal["auto"] = "auto"
    anchor_stride: TokenCount | Literal["auto"] = "auto"
    anchor_offset: CountFromZero = 0
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

    def resolved(self, tokens_per_frame_hw: tuple[int, int]) -> "AttentionConfig":
        """Replace ``auto`` by the values for a latent frame of ``(rows, columns)`` tokens."""
        if self.backend == "dense":
            return self
        rows, columns = tokens_per_frame_hw
        frame = rows * columns
        block_size = AUTO_BLOCK_FRAMES * frame if self.block_size == "auto" else self.block_size
        stride = _spread_stride(frame) if self.anchor_stride == "auto" else self.anchor_stride
        # model_copy does not validate, and the offset must be checked against the stride that will run.
        return AttentionConfig.model_validate(
            self.model_dump() | {"block_size": block_size, "anchor_stride": stride}
        )


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
    dense_steps: DenseSteps | None = None
    dense_layers: tuple[CountFromZero, ...] | None = None
    min_tokens: CountFromZero | None = None

    def over(self, base: AttentionConfig) -> AttentionConfig:
        """Base with these values on top.

        Raises:
            ValueError: a sparse knob is set where the result is dense (it would have no effect), or the
                combination is invalid.
        """
        said = self.model_dump(exclude_none=True)
        backend = said.get("backend", base.backend)
        unused = sorted(set(said) - {"backend"})
        if backend == "dense" and unused:
            raise ValueError(f"{', '.join(unused)} has no effect with backend=dense; leave it out")
        return AttentionConfig.model_validate(base.model_dump() | said)
