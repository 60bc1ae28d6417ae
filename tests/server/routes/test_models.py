"""``/v1/models``."""

import httpx

from configs.model_preset import ModelPreset
from tests.server.routes.test_videos import error_of


def test_the_model_shows_its_limits_and_defaults(client: httpx.Client, preset: ModelPreset) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["state"]) == ("tiny-wan", "model", "ready")
    assert model["defaults"] == preset.defaults.model_dump()
    assert model["limits"] == preset.limits.model_dump()
    assert (model["size_multiple"], model["frames_multiple"]) == (16, 4)
    assert model["attention"]["backend"] == "anchor_local"
    assert client.get("/v1/models/tiny-wan").json() == model


def test_an_unknown_model_is_404(client: httpx.Client) -> None:
    assert "tiny-wan" in error_of(client.get("/v1/models/sora-2"), 404)["message"]
