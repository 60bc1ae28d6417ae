"""Preview pictures of a running job, on the bundled model: the newest one, and the events that bring them."""

import base64
import io
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest
from PIL import Image

from configs.model_preset import BUNDLED_MODEL
from tests.server.routes.test_events import Event, read_events
from tests.server.routes.test_videos import error_of
from tests.server.running_server import RunningServer

SMALL = {"size": "64x64", "num_frames": 9}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The bundled model, with a preview after nearly every step."""
    env = {"REELWRIGHT_PREVIEW_SECONDS": "0.01"}
    with RunningServer(tmp_path_factory.mktemp("previews") / "data", BUNDLED_MODEL, env=env) as running:
        yield running.wait_until_ready()


@pytest.fixture(scope="module")
def events(shapes: RunningServer) -> list[Event]:
    """Everything that a stream of one job said, from its submission to its end."""
    job_id = shapes.submit(num_inference_steps=30, **SMALL)["id"]
    with shapes.client.stream("GET", f"/v1/videos/{job_id}/events") as answer:
        return list(read_events(answer))


def test_pictures_come_with_the_steps(events: list[Event]) -> None:
    previews = [event for event in events if event.name == "preview"]
    assert len(previews) >= 3
    steps = [event.data["step"] for event in previews]
    assert steps == sorted(set(steps))
    for event in previews:
        assert event.data.keys() == {"id", "step", "data_url"}
        kind, _, text = event.data["data_url"].partition(",")
        assert kind == "data:image/jpeg;base64"
        with Image.open(io.BytesIO(base64.b64decode(text)), formats=["JPEG"]) as picture:
            picture.load()
            assert min(picture.size) >= 16


def test_ids_never_fall_and_a_picture_follows_an_event_of_its_version(events: list[Event]) -> None:
    ids = [event.id for event in events]
    assert ids == sorted(ids)
    for before, event in pairwise(events):
        if event.name == "preview":
            assert before.id == event.id
            assert before.name in {"snapshot", "status", "progress"}
    assert events[-1].name == "completed"


def test_the_newest_picture_is_served_while_the_job_runs(shapes: RunningServer) -> None:
    job_id = shapes.submit(num_inference_steps=100, size="128x128")["id"]
    url = f"/v1/videos/{job_id}/content"
    shapes.wait_for(lambda: shapes.job(job_id)["preview_step"] > 0)
    answer = shapes.client.get(url, params={"variant": "preview"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "image/jpeg"
    assert answer.headers["cache-control"] == "no-store"
    assert "etag" not in answer.headers
    with Image.open(io.BytesIO(answer.content), formats=["JPEG"]) as picture:
        picture.load()
    with shapes.client.stream("GET", f"{url[:-8]}/events") as stream:
        names = [event.name for event, _ in zip(read_events(stream), range(2), strict=False)]
    assert names == ["snapshot", "preview"]  # who comes late sees one at once
    shapes.client.post(f"/v1/videos/{job_id}/cancel")
    shapes.wait_for_job(job_id, "cancelled")
    error = error_of(shapes.client.get(url, params={"variant": "preview"}), 409)
    assert error["code"] == "no_content"
    assert not (shapes.data_dir / "videos" / job_id).exists()


def test_a_queued_job_has_none_yet(shapes: RunningServer) -> None:
    running = shapes.submit(num_inference_steps=100, size="128x128")["id"]
    shapes.wait_for_step(running)
    queued = shapes.submit(**SMALL)["id"]
    answer = shapes.client.get(f"/v1/videos/{queued}/content", params={"variant": "preview"})
    assert error_of(answer, 409)["code"] == "not_ready"
    for job_id in (queued, running):
        shapes.client.delete(f"/v1/videos/{job_id}")


def test_the_manifest_of_the_bundled_model_makes_the_same_file(shapes: RunningServer) -> None:
    first = shapes.wait_for_job(shapes.submit(num_inference_steps=3, **SMALL)["id"], "completed")
    manifest = shapes.client.get(f"/v1/videos/{first['id']}/manifest").json()
    answer = shapes.client.post("/v1/videos", json={"manifest": manifest})
    again = shapes.wait_for_job(answer.json()["id"], "completed")
    assert again["file"]["sha256"] == first["file"]["sha256"]


@pytest.mark.parametrize("variant", ["thumbnail", "spritesheet"])
def test_pictures_of_a_finished_video(shapes: RunningServer, variant: str) -> None:
    job = shapes.wait_for_job(shapes.submit(num_inference_steps=2, **SMALL)["id"], "completed")
    url, query = f"/v1/videos/{job['id']}/content", {"variant": variant}
    whole = shapes.client.get(url, params=query)
    made = job[variant]
    assert whole.status_code == 200
    assert whole.headers["content-type"] == made["content_type"] == "image/jpeg"
    assert whole.headers["etag"] == f'"{made["sha256"]}"'
    assert len(whole.content) == made["bytes"]
    with Image.open(io.BytesIO(whole.content), formats=["JPEG"]) as picture:
        assert picture.size == (made["width"], made["height"])
    part = shapes.client.get(url, params=query, headers={"range": "bytes=2-5"})
    assert (part.status_code, part.content) == (206, whole.content[2:6])
    known = shapes.client.get(url, params=query, headers={"if-none-match": whole.headers["etag"]})
    assert (known.status_code, known.content) == (304, b"")
    head = shapes.client.head(url, params=query)
    assert (head.status_code, head.headers["content-length"]) == (200, str(made["bytes"]))
    (shapes.data_dir / "videos" / job["id"] / f"1.{variant}.jpg").unlink()
    assert error_of(shapes.client.get(url, params=query), 410)["code"] == "file_missing"


def test_an_unknown_video_has_no_variant(client: httpx.Client) -> None:
    for variant in ("video", "thumbnail", "spritesheet", "preview"):
        error_of(client.get(f"/v1/videos/video_{'0' * 32}/content", params={"variant": variant}), 404)
