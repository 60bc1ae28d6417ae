"""Tables of latents to colours, and which one a model gets."""

import pytest
from pydantic import ValidationError

from configs.model_preset import BUNDLED_MODEL
from pipelines.projections import Projection, find_projection, known_projections


def test_the_shipped_tables_are_our_own() -> None:
    (table,) = known_projections()
    assert (table.vae, len(table.factors)) == (BUNDLED_MODEL, 16)
    assert table.source.endswith("python -m pipelines.bundled.training.latent_rgb")


def test_a_vae_is_recognised_by_all_of_its_statistics() -> None:
    (table,) = known_projections()
    mean, std = table.latents_mean, table.latents_std
    assert find_projection(mean, std) is table
    assert find_projection(mean, (*std[:-1], 1.0)) is None
    assert find_projection((*mean[:-1], 1.0), std) is None


@pytest.mark.parametrize("field", ["latents_mean", "latents_std", "factors"])
def test_a_table_with_a_missing_row_is_refused(field: str) -> None:
    table = known_projections()[0].model_dump()
    table[field] = table[field][1:]
    with pytest.raises(ValidationError, match=r"\[15, 16\] rows; expected one number"):
        Projection.model_validate(table)
