"""The bundled model through the backend ``window``, over HTTP: as a form, and from the server's settings."""

from collections.abc import Iterator

import pytest

from configs.model_preset import BUNDLED_MODEL
from tests.server.running_server import RunningServer

FRAMES, FRAME_TOKENS = 4, 8 * 8  # of 13 frames of 64x64
LAYERS = 8


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the bundled model whose settings say window."""
    flags = ("--attention-backend", "window", "--min-tokens", "0")
    environment = {"REELWRIGHT_WINDOW": "0"}
    data = tmp_path_factory.mktemp("bundled") / "data"
    with RunningServer(data, BUNDLED_MODEL, *flags, env=environment) as running:
        yield running.wait_until_ready()


def test_a_form_chooses_the_window_and_the_job_says_what_ran(bundled: RunningServer) -> None:
    fields = {
        "prompt": "a red circle moving left quickly on a white background",
        "size": "64x64",
        "num_frames": "13",
        "num_inference_steps": "2",
        "attention[window]": "1",
        "attention[global_frames]": "1",
        "attention[dense_layers][]": "0",
    }
    answer = bundled.client.post("/v1/videos", files={name: (None, value) for name, value in fields.items()})
    assert answer.status_code == 202, answer.text
    video = bundled.wait_for_job(answer.json()["id"])
    assert video["status"] == "completed", video["error"]
    ran = video["attention"]["ran"]
    assert (ran["backend"], ran["implementation"], ran["tokens"]) == (
        "window",
        "torch",
        FRAMES * FRAME_TOKENS,
    )
    assert (ran["window"], ran["window_unit"], ran["global_frames"]) == ([1, 1], "frames", 1)
    assert ran["block_size"] is ran["sink_mode"] is None
    # Two steps, of which the preset has half dense; of the other one, all layers but the first.
    assert ran["sparse_calls"] == LAYERS - 1
    assert ran["dense_reasons"] == {"dense_steps": LAYERS, "dense_layers": 1}
    # Of 4 x 4 pairs of frames, 10 are neighbours or the same, and frames 2 and 3 also see frame 0.
    assert ran["density"] == 12 / 16
    assert video["file"]["frames"] == 13


def test_the_servers_settings_are_what_requests_start_from(bundled: RunningServer) -> None:
    resolved = bundled.submit(size="64x64", num_frames=5, num_inference_steps=1)["attention"]["resolved"]
    assert (resolved["backend"], resolved["window"], resolved["min_tokens"]) == ("window", 0, 0)
    refused = bundled.client.post("/v1/videos", json={"prompt": "a", "attention": {"anchor_stride": 4}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "attention"
    assert "anchor_stride has no effect with backend=window" in refused.json()["error"]["message"]
    unknown = bundled.client.post("/v1/videos", json={"prompt": "a", "attention": {"window_unit": "rows"}})
    assert unknown.status_code == 400
    assert unknown.json()["error"]["param"] == "attention.window_unit"


def test_an_estimate_knows_the_density(bundled: RunningServer) -> None:
    body = {"prompt": "a red circle", "size": "64x64", "num_frames": 13, "attention": {"window": 1}}
    assert bundled.client.post("/v1/videos/estimate", json=body).json()["density"] == 12 / 16


def test_boxes_that_choose_boxes(bundled: RunningServer) -> None:
    asked = {
        "backend": "block_topk",
        "tile_thw": [1, 4, 4],
        "top_k": 0.3,
        "pooled_rest": True,
        "dense_steps": 1,
    }
    body = {"prompt": "a red circle", "size": "64x64", "num_frames": 13, "attention": asked}
    # 16 boxes of 16 tokens, of which 5 are kept: 0.3 of 16, rounded up; none has more than 4 that touch it.
    assert bundled.client.post("/v1/videos/estimate", json=body).json()["density"] == 5 / 16
    video = bundled.submit(size="64x64", num_frames=13, num_inference_steps=2, attention=asked)
    resolved = video["attention"]["resolved"]
    assert (resolved["backend"], resolved["anchor_stride"], resolved["top_k"]) == ("block_topk", "none", 0.3)
    video = bundled.wait_for_job(video["id"])
    assert video["status"] == "completed", video["error"]
    ran = video["attention"]["ran"]
    assert (ran["backend"], ran["implementation"], ran["density"]) == ("block_topk", "torch", 5 / 16)
    assert (ran["tile_thw"], ran["top_k"], ran["pooled_rest"]) == ([1, 4, 4], 0.3, True)
    assert (ran["sparse_calls"], ran["dense_reasons"]) == (LAYERS, {"dense_steps": LAYERS})
    assert ran["anchor_stride"] is ran["window"] is None
    asked["tile_thw"] = [1, 1, 1]
    body |= {"size": "256x256", "attention": asked}  # 4 x 32 x 32 tokens
    refused = bundled.client.post("/v1/videos", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "attention"
    assert "into 4096 boxes; at most 2048" in refused.json()["error"]["message"]


def test_another_backend_is_still_to_be_had(bundled: RunningServer) -> None:
    video = bundled.submit(size="64x64", num_frames=5, num_inference_steps=1, attention={"backend": "dense"})
    assert bundled.wait_for_job(video["id"])["attention"]["ran"]["implementation"] == "sdpa"
