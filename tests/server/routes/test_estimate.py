"""``/v1/videos/estimate`` on a real server with a tiny model."""

import json
from typing import Any

import httpx
import pytest

from tests.server.routes.test_videos import BAD_FIELDS, error_of
from tests.server.running_server import RunningServer


def estimate(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    """The answer to a request that is right."""
    answer = client.post("/v1/videos/estimate", json={"prompt": "a red circle"} | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_it_is_what_a_submission_would_become(server: RunningServer, client: httpx.Client) -> None:
    before = client.get("/v1/videos").json()["first_id"]
    fields = {"size": "64x96", "seconds": 2, "num_inference_steps": 5, "seed": 3}
    found = estimate(client, **fields)
    assert client.get("/v1/videos").json()["first_id"] == before
    video = server.submit(**fields)
    shared = (
        "model",
        "size",
        "num_frames",
        "fps",
        "seconds",
        "num_inference_steps",
        "guidance_scale",
        "seed",
    )
    assert {name: found[name] for name in shared} == {name: video[name] for name in shared}
    assert found["attention"] == video["attention"]["resolved"]
    assert found["token_grid"] == [5, 6, 4]
    assert found["tokens"] == 5 * 6 * 4
    assert found["warnings"] == ["seconds 2 becomes 2.125 (17 frames), the nearest valid length"]
    ran = server.wait_for_job(video["id"])["attention"]["ran"]
    assert (found["tokens"], found["density"]) == (ran["tokens"], pytest.approx(ran["density"]))
    calls = ran["sparse_calls"] + ran["dense_calls"]
    mean = (ran["sparse_calls"] * ran["density"] + ran["dense_calls"]) / calls
    assert found["mean_density"] == pytest.approx(mean)
    assert found["dense_steps"] * 2 == ran["dense_reasons"]["dense_steps"]  # two layers


def test_times_come_from_jobs_that_ran(server: RunningServer, client: httpx.Client) -> None:
    shape = {"size": "96x96", "num_inference_steps": 2, "num_frames": 5}
    job = server.wait_for_job(server.submit(**shape)["id"])
    found = estimate(client, **shape)
    assert found["basis"] == "measured"
    assert found["predicted_seconds"] == pytest.approx(job["metrics"]["total_seconds"], rel=0.5, abs=0.5)
    assert found["predicted_peak_memory_bytes"] == job["metrics"]["peak_memory_bytes"]
    assert found["fits"] is True
    assert "GiB" in found["fits_reason"]
    assert estimate(client, **(shape | {"size": "96x112"}))["basis"] == "scaled"


def test_the_place_in_the_queue_depends_on_the_priority(server: RunningServer, client: httpx.Client) -> None:
    assert (estimate(client)["queue_position"], estimate(client)["starts_in_seconds"]) == (1, 0.0)
    running = server.submit_long()["id"]
    server.wait_for_step(running)
    queued = [server.submit_long()["id"], server.submit_long(priority=5)["id"]]
    assert [estimate(client, priority=p)["queue_position"] for p in (-1, 0, 1, 5, 6)] == [3, 3, 2, 2, 1]
    for job_id in (*queued, running):
        client.delete(f"/v1/videos/{job_id}")


def test_words_that_are_cut_are_named(client: httpx.Client) -> None:
    words = ["red", "green"] * 10
    found = estimate(client, prompt=" ".join(words))
    assert found["cut_words"] == {"prompt": words[15:]}  # of 16 tokens one ends the text
    (warning,) = found["warnings"]
    assert warning.startswith("prompt: 15 of 20 text tokens are used; cut: ")
    guided = estimate(client, guidance_scale=2, negative_prompt=" ".join(words))
    assert guided["cut_words"] == {"prompt": [], "negative_prompt": words[15:]}


def test_a_seed_that_is_not_given_is_not_made_up(client: httpx.Client) -> None:
    assert estimate(client)["seed"] is None
    assert estimate(client, negative_prompt="x")["warnings"] == [
        "negative_prompt has no effect: guidance_scale is not above 1"
    ]


@pytest.mark.parametrize(("fields", "param", "hint"), BAD_FIELDS[::7], ids=lambda value: str(value)[:40])
def test_what_cannot_be_submitted_cannot_be_estimated(
    client: httpx.Client, fields: dict[str, Any], param: str, hint: str
) -> None:
    error = error_of(client.post("/v1/videos/estimate", json={"prompt": "x"} | fields), 400)
    assert error["param"] == param
    assert hint in error["message"]


def test_a_form_is_understood_too(client: httpx.Client) -> None:
    answer = client.post("/v1/videos/estimate", files={"prompt": (None, "x"), "num_frames": (None, "5")})
    assert json.loads(answer.text)["num_frames"] == 5
