"""Manifests, and clips that are made again from them."""

import json
from typing import Any

import httpx
import pytest

from tests.server.routes.test_videos import error_of
from tests.server.running_server import RunningServer


@pytest.fixture(scope="module")
def video(server: RunningServer) -> dict[str, Any]:
    """A finished clip with a seed that the server chose."""
    asked = {"backend": "anchor_local", "block_size": 16, "dense_layers": [1]}
    return server.wait_for_job(server.submit(attention=asked, metadata={"shot": "1"})["id"], "completed")


@pytest.fixture(scope="module")
def manifest(client: httpx.Client, video: dict[str, Any]) -> dict[str, Any]:
    """Its manifest."""
    answer = client.get(f"/v1/videos/{video['id']}/manifest")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_it_says_what_ran(manifest: dict[str, Any], video: dict[str, Any]) -> None:
    parameters = manifest["parameters"]
    assert (parameters["seed"], parameters["prompt"]) == (video["seed"], video["prompt"])
    assert parameters["attention"] == video["attention"]["resolved"]
    assert manifest["attention"] == video["attention"]["ran"]
    assert manifest["environment"]["versions"].keys() >= {"reelwright", "torch", "diffusers"}
    assert manifest["environment"]["scheduler"] == "UniPCMultistepScheduler"


@pytest.mark.parametrize("way", ["json", "form", "file"])
def test_it_makes_the_same_clip_again(
    server: RunningServer, client: httpx.Client, manifest: dict[str, Any], video: dict[str, Any], way: str
) -> None:
    text = json.dumps(manifest)
    if way == "json":
        answer = client.post("/v1/videos", json={"manifest": manifest, "metadata": {"again": "1"}})
    else:
        part = (None, text) if way == "form" else ("manifest.json", text.encode())
        answer = client.post("/v1/videos", files={"manifest": part, "metadata[again]": (None, "1")})
    assert answer.status_code == 202, answer.text
    again = server.wait_for_job(answer.json()["id"])
    assert again["status"] == "completed"
    assert again["metadata"] == {"again": "1"}
    assert again["file"]["sha256"] == video["file"]["sha256"]
    assert client.get(f"/v1/videos/{again['id']}/manifest").json()["parameters"] == manifest["parameters"]


@pytest.mark.parametrize(
    ("changes", "beside", "param", "hint"),
    [
        ({"model": "another"}, {}, "manifest.parameters.model", "tiny-wan"),
        ({"width": 65}, {}, "manifest.parameters", "64 or 80"),
        ({"width": 0}, {}, "manifest.parameters.size", "WIDTHxHEIGHT"),
        ({"num_frames": 10}, {}, "manifest.parameters", "9 or 13"),
        ({"num_inference_steps": 10_000}, {}, "manifest.parameters", "1000"),
        ({"prompt": ""}, {}, "manifest.parameters.prompt", "at least 1"),
        ({"prompt": "a\0"}, {}, "manifest.parameters.prompt", "U+0000"),
        ({"seed": -1}, {}, "manifest.parameters.seed", "0"),
        ({"more": 1}, {}, "manifest.parameters.more", "unknown"),
        ({}, {"prompt": "x"}, "prompt", "leave it out"),
        ({}, {"size": "64x64", "seed": 1}, "seed", "leave it out"),
        ({}, {"promt": "x"}, "promt", "unknown"),
    ],
)
def test_a_manifest_that_cannot_run_is_refused(
    client: httpx.Client,
    manifest: dict[str, Any],
    changes: dict[str, Any],
    beside: dict[str, Any],
    param: str,
    hint: str,
) -> None:
    body = {"manifest": manifest | {"parameters": manifest["parameters"] | changes}} | beside
    for path in ("/v1/videos", "/v1/videos/estimate"):
        error = error_of(client.post(path, json=body), 400)
        assert error["param"] == param
        assert hint in error["message"]


@pytest.mark.parametrize("value", [None, 1, "x", [], {}])
def test_what_is_no_manifest_is_refused(client: httpx.Client, value: Any) -> None:
    param = error_of(client.post("/v1/videos", json={"manifest": value}), 400)["param"]
    assert param.startswith("manifest")


def test_it_is_409_until_the_clip_is_there(server: RunningServer, client: httpx.Client) -> None:
    job_id = server.submit_long()["id"]
    assert error_of(client.get(f"/v1/videos/{job_id}/manifest"), 409)["code"] == "not_ready"
    client.post(f"/v1/videos/{job_id}/cancel")
    server.wait_for_job(job_id, "cancelled")
    assert error_of(client.get(f"/v1/videos/{job_id}/manifest"), 409)["code"] == "no_content"
    client.delete(f"/v1/videos/{job_id}")
    error_of(client.get(f"/v1/videos/{job_id}/manifest"), 404)
