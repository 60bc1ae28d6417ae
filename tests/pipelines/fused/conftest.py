"""Tests' models are small; they run as wide ones do."""

import pytest

from pipelines.fused import wan


@pytest.fixture(autouse=True)
def small_models_count_as_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wan, "MOST_NARROW_CHANNELS", 0)
