"""What settings change of the model's own defaults."""

import pytest

from configs.attention import AttentionBackend, AttentionPrecision
from configs.settings import Settings
from server.model_choice import choose_model


@pytest.mark.parametrize(
    ("backend", "said", "precision"),
    [
        (None, None, "fp8"),
        (None, "full", "full"),
        ("window", None, "full"),
        ("dense", None, "full"),
    ],
)
def test_fp8_brings_attention_along_where_it_can_and_nothing_else_is_said(
    backend: AttentionBackend | None, said: AttentionPrecision | None, precision: AttentionPrecision
) -> None:
    settings = Settings(precision="fp8", attention_backend=backend, attention_precision=said)
    assert choose_model(settings)[1].precision == precision
    assert choose_model(settings.model_copy(update={"precision": "full"}))[1].precision == "full"


def test_the_step_cache_of_the_settings_is_the_default_of_requests() -> None:
    assert choose_model(Settings())[0].defaults.step_cache == "off"
    assert choose_model(Settings(step_cache="first_block"))[0].defaults.step_cache == "first_block"
