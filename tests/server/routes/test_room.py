"""Clips that the device has no room for, on a real server whose worker may have 1.5 GiB."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from configs.model_preset import ModelPreset
from tests.server.routes.test_videos import error_of
from tests.server.running_server import RunningServer

LIMIT_BYTES = 3 * 2**29
HUGE = {"size": "2048x2048", "num_frames": 33, "num_inference_steps": 1}


@pytest.fixture(scope="module")
def small(preset: ModelPreset, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a model that would make clips for which that is not enough."""
    limits = preset.limits.model_copy(update={"max_side": 4096})
    model = tmp_path_factory.mktemp("presets") / "large.yaml"
    content = preset.model_copy(update={"limits": limits}).model_dump(mode="json")
    model.write_text(yaml.safe_dump(content), encoding="utf-8")
    flags = ("--memory-limit-bytes", str(LIMIT_BYTES))
    with RunningServer(tmp_path_factory.mktemp("room") / "data", model, *flags) as running:
        yield running.wait_until_ready()


def refused(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """The error of a submission that is refused."""
    answer = server.client.post("/v1/videos", json={"prompt": "a red circle"} | fields)
    return error_of(answer, 400)


def estimate(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """What would become of a submission."""
    answer = server.client.post("/v1/videos/estimate", json={"prompt": "a red circle"} | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_clip_without_room_is_refused_before_it_is_queued(small: RunningServer) -> None:
    error = refused(small, **HUGE)
    assert (error["code"], error["type"]) == ("does_not_fit", "invalid_request_error")
    assert error["param"] in ("size", "num_frames")
    assert error["message"].startswith("33 frames of 2048x2048 would need ")
    assert error["message"].endswith(" would fit")
    assert small.client.get("/v1/videos").json()["data"] == []


def test_the_estimate_says_what_would_fit(small: RunningServer) -> None:
    found = estimate(small, **HUGE)
    assert (found["fits"], found["basis"], found["offload"]) == (False, None, "none")
    assert found["memory_total_bytes"] == LIMIT_BYTES
    assert found["fits_reason"] == refused(small, **HUGE)["message"]
    assert found["predicted_peak_memory_bytes"] == max(found["predicted_peak_memory_by_stage"].values())
    assert found["would_fit"]
    for clip in found["would_fit"]:
        assert estimate(small, **(HUGE | clip))["fits"] is True


def test_what_has_room_is_made_and_teaches_the_estimate(small: RunningServer) -> None:
    before = estimate(small)
    assert (before["fits"], before["would_fit"], before["peak_memory_error"]) == (True, [], None)
    job = small.wait_for_job(small.submit()["id"])
    assert job["status"] == "completed"
    assert job["memory"]["offload"] == "none"
    assert job["memory"]["available_bytes"] <= LIMIT_BYTES
    assert set(job["memory"]["predicted_peak_by_stage"]) == {"text_encode", "denoise", "vae_decode"}
    manifest = small.client.get(f"/v1/videos/{job['id']}/manifest").json()
    assert (manifest["offload"], manifest["feed_forward_chunks"]) == ("none", 1)
    after = estimate(small, num_frames=5)
    assert after["peak_memory_error"] is not None
    assert '"event": "job_memory"' in small.log.read_text()
