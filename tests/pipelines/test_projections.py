"""Tables of latents to colours, and which one a model gets."""

import inspect

import pytest
from diffusers import AutoencoderKLWan
from pydantic import ValidationError

from configs.model_preset import BUNDLED_MODEL
from pipelines import LoadedPipeline
from pipelines.projections import Projection, find_projection, known_projections, preview_projection


def test_the_shipped_tables() -> None:
    rows = {table.vae: len(table.factors) for table in known_projections()}
    assert rows == {BUNDLED_MODEL: 16, "Wan 2.1": 16, "Wan 2.2 TI2V 5B": 48}
    assert all(table.source for table in known_projections())


def test_wan_2_1_is_recognised_by_the_statistics_that_diffusers_knows() -> None:
    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters
    mean, std = (tuple(defaults[name].default) for name in ("latents_mean", "latents_std"))
    found = find_projection(mean, std)
    assert found is not None
    assert found.vae == "Wan 2.1"
    assert find_projection(mean, (*std[:-1], 1.0)) is None


def test_another_vae_has_no_projection(loaded: LoadedPipeline) -> None:
    assert preview_projection(loaded) is None


@pytest.mark.parametrize("field", ["latents_mean", "latents_std", "factors"])
def test_a_table_with_a_missing_row_is_refused(field: str) -> None:
    table = known_projections()[0].model_dump()
    table[field] = table[field][1:]
    with pytest.raises(ValidationError, match=r"\[15, 16\] rows; expected one number"):
        Projection.model_validate(table)
