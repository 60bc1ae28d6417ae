"""``/v1/videos`` over HTTP, on a real server with a tiny model."""

import json
from typing import Any

import httpx
import pytest

from server.files import DataFolder
from tests.server.running_server import RunningServer
from tests.server.samples import UNKNOWN_ID

JSON = {"content-type": "application/json"}

BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "at least 1 character"),
    ({"prompt": "  \n"}, "prompt", "blank"),
    ({"prompt": 5}, "prompt", "string"),
    ({"prompt": "x" * 10_001}, "prompt", "10000"),
    ({"promt": "x"}, "promt", "'prompt'"),
    ({"size": "64"}, "size", "WIDTHxHEIGHT"),
    ({"size": "65x64"}, "size", "64 or 80"),
    ({"size": "64x10000"}, "size", "16 to 256"),
    ({"size": [64, 64]}, "size", "string"),
    ({"num_frames": 10}, "num_frames", "9 or 13"),
    ({"num_frames": 37}, "num_frames", "33"),
    ({"num_frames": "9"}, "num_frames", "integer"),
    ({"num_frames": True}, "num_frames", "integer"),
    ({"num_frames": 0}, "num_frames", "1"),
    ({"num_frames": 9, "seconds": 1}, "num_frames", "not both"),
    ({"seconds": 0}, "seconds", "greater than 0"),
    ({"seconds": "long"}, "seconds", "number"),
    ({"seconds": "nan"}, "seconds", "finite"),
    ({"seconds": 60}, "seconds", "at most 33"),
    ({"fps": 0}, "fps", "1"),
    ({"fps": 500}, "fps", "120"),
    ({"num_inference_steps": 0}, "num_inference_steps", "1"),
    ({"num_inference_steps": 1001}, "num_inference_steps", "1000"),
    ({"guidance_scale": -1}, "guidance_scale", "0"),
    ({"guidance_scale": 31}, "guidance_scale", "30"),
    ({"seed": -1}, "seed", "0"),
    ({"seed": 2**32}, "seed", "4294967295"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"model": "sora-2"}, "model", "tiny-wan"),
    ({"attention": "dense"}, "attention", "object"),
    ({"attention": {"backend": "fast"}}, "attention.backend", "'anchor_local'"),
    ({"attention": {"blok_size": 64}}, "attention.blok_size", "attention.block_size"),
    ({"attention": {"block_size": 0}}, "attention.block_size", "1"),
    ({"attention": {"block_size": "big"}}, "attention.block_size", "'auto'"),
    ({"attention": {"anchor_stride": 4, "anchor_offset": 4}}, "attention", "below anchor_stride"),
    ({"attention": {"backend": "dense", "block_size": 64}}, "attention", "no effect"),
    ({"attention": {"dense_steps": 1.5}}, "attention", "whole number"),
    ({"attention": {"dense_layers": [-1]}}, "attention.dense_layers[0]", "0"),
    ({"attention": {"dense_layers": [2**31]}}, "attention.dense_layers[0]", "2147483647"),
    ({"attention": {"min_tokens": 2**31}}, "attention.min_tokens", "2147483647"),
    ({"attention": {"anchor_offset": 2**31}}, "attention.anchor_offset", "2147483647"),
    ({"metadata": {"a": 1}}, "metadata.a", "string"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a", "512"),
    ({"metadata": {f"k{i}": "" for i in range(17)}}, "metadata", "16"),
    ({"prompt": "a\0b"}, "prompt", "U+0000"),
    ({"negative_prompt": "\0"}, "negative_prompt", "U+0000"),
    ({"metadata": {"a": "\0"}}, "metadata.a", "U+0000"),
    ({"metadata": {"\0": "a"}}, "metadata.\0", "U+0000"),
    ({"priority": 101}, "priority", "100"),
    ({"priority": "1"}, "priority", "integer"),
    ({"deadline_seconds": 0}, "deadline_seconds", "greater than 0"),
    ({"checkpoint_every": -1}, "checkpoint_every", "0"),
    ({"input_reference": "x"}, "input_reference", "data:image"),
    ({"webhook_url": "https://127.0.0.1/"}, "webhook_url", "REELWRIGHT_WEBHOOK_SECRET"),
    ({"manifest": 1}, "prompt", "leave it out"),
]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error in the envelope, after checking the envelope."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    return dict(body["error"])


def test_a_prompt_becomes_a_video(server: RunningServer, client: httpx.Client) -> None:
    answer = client.post(
        "/v1/videos",
        json={"prompt": "a red circle", "seconds": 1, "seed": 5, "metadata": {"shot": "7"}},
    )
    assert answer.status_code == 202
    submitted = answer.json()
    assert answer.headers["location"] == f"/v1/videos/{submitted['id']}"
    assert int(answer.headers["openai-poll-after-ms"]) > 0
    assert (submitted["object"], submitted["status"], submitted["progress"]) == ("video", "queued", 0)
    moved = "seconds 1 becomes 1.125 (9 frames), the nearest valid length"
    assert submitted["warnings"] == [moved]
    video = server.wait_for_job(submitted["id"])
    assert video["status"] == "completed"
    assert video["progress"] == 100
    assert (video["size"], video["num_frames"], video["fps"]) == ("64x64", 9, 8)
    assert (video["seconds"], video["seed"], video["metadata"]) == ("1.125", 5, {"shot": "7"})
    assert moved in video["warnings"]
    assert video["step"] == video["total_steps"] == video["num_inference_steps"] == 3
    assert video["created_at"] <= video["started_at"] <= video["completed_at"]
    assert video["error"] is video["stage"] is video["eta_seconds"] is video["queue_position"] is None
    file = video["file"]
    assert (file["codec"], file["pixel_format"]) == ("h264", "yuv420p")
    assert (file["width"], file["height"], file["frames"], file["fps"]) == (64, 64, 9, 8.0)
    metrics = video["metrics"]
    assert metrics["queue_seconds"] >= 0
    assert 0 < metrics["step_seconds"]["median"] <= metrics["step_seconds"]["max"]
    assert metrics["total_seconds"] >= metrics["denoise_seconds"] > 0
    assert metrics["peak_memory_bytes"] == max(metrics["peak_memory_by_stage"].values()) > 0


def test_attention_is_shown_as_asked_resolved_and_run(server: RunningServer) -> None:
    asked = {"block_size": 16, "anchor_stride": 5, "dense_steps": 1}
    video = server.wait_for_job(server.submit(attention=asked)["id"])
    attention = video["attention"]
    assert attention["requested"].items() >= asked.items()
    assert attention["resolved"]["block_size"] == attention["ran"]["block_size"] == 16
    assert attention["ran"]["backend"] == "anchor_local"
    # Two layers and three steps, the first of them dense.
    assert attention["ran"]["sparse_calls"] == 4
    assert attention["ran"]["dense_reasons"] == {"dense_steps": 2}
    assert 0 < attention["ran"]["density"] < 1


def test_a_step_cache_is_shown_as_asked_and_run(server: RunningServer, client: httpx.Client) -> None:
    video = server.wait_for_job(server.submit(step_cache="first_block")["id"])
    assert video["step_cache"] == video["compute"]["step_cache"] == "first_block"
    assert video["compute"]["passes"] == video["total_steps"]
    assert (video["compute"]["compiled"], video["compute"]["precision"]) == (False, "full")
    assert "on a CPU" in video["compute"]["eager_reason"]
    manifest = client.get(f"/v1/videos/{video['id']}/manifest").json()
    assert manifest["parameters"]["step_cache"] == "first_block"
    assert manifest["environment"]["compiled"] is False
    rotating = {"anchor_rotation": True}
    body = {"prompt": "a red circle", "step_cache": "first_block", "attention": rotating}
    error = error_of(client.post("/v1/videos", json=body), 400)
    assert error["param"] == "step_cache"
    assert "anchor_rotation" in error["message"]


def test_without_a_seed_one_is_chosen_and_shown(server: RunningServer) -> None:
    first, second = server.submit(), server.submit()
    assert first["seed"] != second["seed"]
    assert server.wait_for_job(first["id"])["seed"] == first["seed"]


def test_the_same_seed_makes_the_same_file(server: RunningServer) -> None:
    ids = [server.submit(seed=11)["id"] for _ in range(2)]
    first, second = (server.wait_for_job(job_id)["file"]["sha256"] for job_id in ids)
    assert first == second


def test_a_form_says_the_same_as_json(client: httpx.Client, server: RunningServer) -> None:
    answer = client.post(
        "/v1/videos",
        files=[
            ("prompt", (None, "a blue square")),
            ("seconds", (None, "1")),
            ("num_inference_steps", (None, "2")),
            ("attention[block_size]", (None, "16")),
            ("attention[dense_layers][]", (None, "0")),
            ("metadata[shot]", (None, "7")),
        ],
    )
    assert answer.status_code == 202, answer.text
    video = answer.json()
    assert (video["prompt"], video["num_inference_steps"]) == ("a blue square", 2)
    assert video["metadata"] == {"shot": "7"}
    assert video["attention"]["resolved"]["block_size"] == 16
    assert video["attention"]["resolved"]["dense_layers"] == [0]
    assert server.wait_for_job(video["id"])["status"] == "completed"


def test_a_repeated_submission_is_one_job(client: httpx.Client) -> None:
    body, headers = {"prompt": "a red circle", "seconds": 1}, {"idempotency-key": "order-7"}
    first = client.post("/v1/videos", json=body, headers=headers)
    again = client.post("/v1/videos", json=body, headers=headers)
    as_form = client.post("/v1/videos", files={k: (None, str(v)) for k, v in body.items()}, headers=headers)
    assert [answer.status_code for answer in (first, again, as_form)] == [202, 200, 200]
    assert first.json()["id"] == again.json()["id"] == as_form.json()["id"]
    assert again.headers["location"] == first.headers["location"]
    error = error_of(client.post("/v1/videos", json=body | {"seed": 1}, headers=headers), 422)
    assert (error["code"], error["param"]) == ("idempotency_conflict", "Idempotency-Key")
    assert first.json()["id"] in error["message"]
    error_of(client.post("/v1/videos", json=body, headers={"idempotency-key": "k" * 256}), 400)


@pytest.mark.parametrize(("fields", "param", "hint"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_named_and_nothing_is_queued(
    client: httpx.Client, fields: dict[str, Any], param: str, hint: str
) -> None:
    before = client.get("/v1/videos").json()["first_id"]
    error = error_of(client.post("/v1/videos", json={"prompt": "x"} | fields), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert hint in error["message"]
    assert client.get("/v1/videos").json()["first_id"] == before


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"[" * 50_000, "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b"[]", "invalid_value"),
        (b'"prompt"', "invalid_value"),
        (b"null", "invalid_value"),
        (b"{}", "missing_field"),
    ],
)
def test_a_body_that_is_no_request_is_400(client: httpx.Client, body: bytes, code: str) -> None:
    assert error_of(client.post("/v1/videos", content=body, headers=JSON), 400)["code"] == code


@pytest.mark.parametrize("field", ["seconds", "guidance_scale", "attention.dense_steps"])
@pytest.mark.parametrize("number", ["1e400", "-1e400", "Infinity", "NaN"])
def test_a_number_that_is_not_finite_is_refused(client: httpx.Client, field: str, number: str) -> None:
    outer, _, inner = field.partition(".")
    value = f'{{"{inner}": {number}}}' if inner else number
    body = f'{{"prompt": "x", "{outer}": {value}}}'
    assert error_of(client.post("/v1/videos", content=body, headers=JSON), 400)["param"] == field
    form = {"prompt": "x", outer + (f"[{inner}]" if inner else ""): number}
    as_form = client.post("/v1/videos", files={name: (None, text) for name, text in form.items()})
    assert error_of(as_form, 400)["param"] == field


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ([("prompt", (None, "a")), ("prompt", (None, "b"))], "prompt"),
        ([("prompt", (None, "a")), ("attention[", (None, "b"))], "attention["),
        ([("prompt", (None, "a")), ("atention[block_size]", (None, "6"))], "atention"),
        ([("prompt", (None, "a")), ("attention[block_size]", (None, "x"))], "attention.block_size"),
        ([("prompt", (None, "a")), ("num_frames", (None, "9.5"))], "num_frames"),
        ([("prompt", ("a.txt", b"a"))], "prompt"),
        ([("prompt", (None, "a")), ("input_reference", ("a.png", b"x"))], "input_reference"),
    ],
)
def test_a_bad_form_field_is_named(client: httpx.Client, files: Any, param: str) -> None:
    assert error_of(client.post("/v1/videos", files=files), 400)["param"] == param


@pytest.mark.parametrize("content", [b"", b"--x\r\n\r\n", b"nonsense"])
def test_a_broken_form_is_400(client: httpx.Client, content: bytes) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    error_of(client.post("/v1/videos", content=content, headers=headers), 400)
    error_of(client.post("/v1/videos", content=content, headers={"content-type": "multipart/form-data"}), 400)


@pytest.mark.parametrize("name", ["+2AA-", "metadata[+2AA-]", "attention[+2AA-]"])
def test_a_form_with_halves_of_characters_is_400(client: httpx.Client, name: str) -> None:
    field = f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n+2AA-\r\n'
    headers = {"content-type": "multipart/form-data; boundary=x; charset=utf-7"}
    answer = client.post("/v1/videos", content=f"{field}{field}--x--\r\n".encode(), headers=headers)
    assert error_of(answer, 400)["code"] == "invalid_form"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_another_content_type_is_415(client: httpx.Client, kind: str) -> None:
    answer = client.post("/v1/videos", content=b"prompt=x", headers={"content-type": kind})
    assert "application/json" in error_of(answer, 415)["message"]


def test_a_large_body_is_413(client: httpx.Client) -> None:
    body = json.dumps({"prompt": "x" * 2_000_000}).encode()
    assert error_of(client.post("/v1/videos", content=body, headers=JSON), 413)["code"] == "body_too_large"
    chunks = iter([body[:900_000], body[900_000:]])
    assert error_of(client.post("/v1/videos", content=chunks, headers=JSON), 413)["code"] == "body_too_large"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("video_id", [UNKNOWN_ID, "x", "..", "%2e%2e%2fjobs.sqlite3", "a" * 3000])
def test_an_unknown_id_is_404(client: httpx.Client, method: str, video_id: str) -> None:
    error_of(client.request(method, f"/v1/videos/{video_id}"), 404)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/videos/", 404),
        ("POST", "/v1/videos/", 404),
        ("PUT", "/v1/videos", 405),
        ("DELETE", "/v1/videos", 405),
        ("POST", "/health/live", 405),
        ("GET", f"/v1/videos/{UNKNOWN_ID}/cancel", 405),
        ("POST", f"/v1/videos/{UNKNOWN_ID}/cancel", 404),
    ],
)
def test_the_frameworks_own_errors_have_the_envelope(
    client: httpx.Client, method: str, path: str, status: int
) -> None:
    error_of(client.request(method, path), status)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=many", "limit"),
        ("order=up", "order"),
        ("status=done", "status"),
        ("after=video_x", "after"),
        ("limt=5", "limt"),
    ],
)
def test_a_bad_query_parameter_is_named(client: httpx.Client, query: str, param: str) -> None:
    assert error_of(client.get(f"/v1/videos?{query}"), 400)["param"] == param


def test_a_webhook_without_a_secret_is_unsupported(client: httpx.Client) -> None:
    for path in ("/v1/videos", "/v1/videos/estimate"):
        error = error_of(client.post(path, json={"prompt": "x", "webhook_url": "https://example.com/"}), 400)
        assert (error["code"], error["param"]) == ("unsupported", "webhook_url")


def test_pages_link_up(client: httpx.Client, server: RunningServer) -> None:
    for _ in range(3):
        server.wait_for_job(server.submit(num_inference_steps=1)["id"])
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 2, "status": "completed"}
    while True:
        page = client.get("/v1/videos", params=query).json()
        ids = [video["id"] for video in page["data"]]
        assert (page["first_id"], page["last_id"]) == (ids[0], ids[-1])
        seen += ids
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert len(seen) >= 3
    assert seen == sorted(set(seen), reverse=True)
    oldest_first = client.get("/v1/videos", params={"order": "asc", "status": "completed", "limit": 2}).json()
    assert [video["id"] for video in oldest_first["data"]] == seen[::-1][:2]


def test_an_empty_page_has_no_ids(client: httpx.Client) -> None:
    page = client.get("/v1/videos", params={"after": "video_" + "0" * 32, "order": "desc"}).json()
    assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_a_running_job_is_cancelled_within_a_step(server: RunningServer, client: httpx.Client) -> None:
    # Steps long enough for the row to keep up with the worker.
    job_id = server.submit(num_inference_steps=250, size="256x256", num_frames=33)["id"]
    step = server.wait_for_step(job_id)["step"]
    answer = client.post(f"/v1/videos/{job_id}/cancel")
    assert answer.status_code == 202
    assert answer.json()["cancel_requested"]
    at_cancel = answer.json()["step"]
    video = server.wait_for_job(job_id)
    assert video["status"] == "cancelled"
    # One step that was ending as the cancel came, and the one that it met.
    assert step <= at_cancel <= video["step"] <= at_cancel + 2
    assert video["completed_at"] is not None
    again = client.post(f"/v1/videos/{job_id}/cancel")
    assert (again.status_code, again.json()) == (200, video)
    assert not (server.data_dir / "videos" / job_id).exists()


def test_a_queued_job_is_cancelled_at_once(server: RunningServer, client: httpx.Client) -> None:
    running, queued = server.submit_long()["id"], server.submit_long()["id"]
    server.wait_for_job(running, "in_progress")
    assert server.job(queued)["queue_position"] == 1
    checkpoint = DataFolder(server.data_dir).checkpoint(queued)
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"of an attempt before")
    answer = client.post(f"/v1/videos/{queued}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert not checkpoint.parent.exists()
    client.post(f"/v1/videos/{running}/cancel")
    assert server.wait_for_job(running)["status"] == "cancelled"


def test_a_running_job_has_an_eta_and_honest_progress(server: RunningServer, client: httpx.Client) -> None:
    job_id = server.submit_long()["id"]
    first = server.wait_for_step(job_id, 2)
    later = server.wait_for_step(job_id, first["step"] + 5)
    assert first["stage"] == later["stage"] == "denoise"
    assert first["eta_seconds"] > 0
    assert 0 < first["progress"] <= later["progress"] < 100
    client.delete(f"/v1/videos/{job_id}")


def test_a_deleted_running_job_stops_and_does_not_come_back(
    server: RunningServer, client: httpx.Client
) -> None:
    job_id = server.submit_long()["id"]
    server.wait_for_step(job_id)
    answer = client.delete(f"/v1/videos/{job_id}")
    assert answer.json() == {"id": job_id, "object": "video.deleted", "deleted": True}
    error_of(client.get(f"/v1/videos/{job_id}"), 404)
    error_of(client.delete(f"/v1/videos/{job_id}"), 404)
    # The next job starts only when the worker has let go of the deleted one.
    assert server.wait_for_job(server.submit()["id"])["status"] == "completed"
    error_of(client.get(f"/v1/videos/{job_id}"), 404)
    assert not (server.data_dir / "videos" / job_id).exists()


def test_a_deleted_video_takes_its_file_along(server: RunningServer, client: httpx.Client) -> None:
    job_id = server.submit()["id"]
    server.wait_for_job(job_id)
    folder = server.data_dir / "videos" / job_id
    assert {path.name for path in folder.iterdir()} == {"1.mp4", "1.thumbnail.jpg", "1.spritesheet.jpg"}
    assert client.delete(f"/v1/videos/{job_id}").status_code == 200
    assert not folder.exists()


def test_a_deleted_queued_job_never_runs(server: RunningServer, client: httpx.Client) -> None:
    running, queued = server.submit_long()["id"], server.submit()["id"]
    assert client.delete(f"/v1/videos/{queued}").status_code == 200
    client.delete(f"/v1/videos/{running}")
    assert server.wait_for_job(server.submit()["id"])["status"] == "completed"
    assert not (server.data_dir / "videos" / queued).exists()
