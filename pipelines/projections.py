"""Which linear map turns a model's latents into colours.

Knows: tables of such maps, each for one VAE. Does not know: pictures, or how a VAE without a table gets its
map (pipelines/colour_learning.py). A VAE is recognised by the statistics that its latents are normalised
with: a map fits one normalisation only.
"""

import functools
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

TABLE_FOLDER = Path(__file__).parent / "latent_rgb"
Rgb = tuple[float, float, float]


class Projection(BaseModel):
    """Red, green and blue in -1 to 1 are ``bias`` plus the normalised latents times ``factors`` [C][3]."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vae: str = Field(description="The VAE that it is for.")
    source: str = Field(description="Where the numbers come from.")
    psnr_decibels: float | None = Field(
        default=None, description="Against the mean colour of each latent's pixels; None: not measured here."
    )
    latents_mean: Annotated[tuple[float, ...], Field(min_length=1)]
    latents_std: tuple[float, ...]
    factors: tuple[Rgb, ...]
    bias: Rgb

    @model_validator(mode="after")
    def _one_row_per_channel(self) -> Self:
        rows = {len(self.latents_mean), len(self.latents_std), len(self.factors)}
        if len(rows) != 1:
            raise ValueError(
                f"latents_mean, latents_std and factors have {sorted(rows)} rows; expected one number"
            )
        return self


def find_projection(latents_mean: tuple[float, ...], latents_std: tuple[float, ...]) -> Projection | None:
    """The map of the VAE with these statistics, or None."""
    statistics = (latents_mean, latents_std)
    return next(
        (each for each in known_projections() if (each.latents_mean, each.latents_std) == statistics), None
    )


@functools.cache
def known_projections() -> tuple[Projection, ...]:
    """All tables that ship with the package."""
    paths = sorted(TABLE_FOLDER.glob("*.json"))
    return tuple(Projection.model_validate_json(path.read_bytes()) for path in paths)
