"""Submissions with pictures, and bodies that are made to break something, over HTTP on a real server."""

import base64
import json
from typing import Any

import httpx
import pytest

from tests.server.picture_files import bomb, picture, text_bomb, wide_webp
from tests.server.routes.test_videos import JSON, error_of
from tests.server.running_server import RunningServer

PATHS = ("/v1/videos", "/v1/videos/estimate")
MIB = 2**20


def upload(client: httpx.Client, data: bytes, path: str = "/v1/videos", **texts: str) -> httpx.Response:
    """Send a picture in a form."""
    fields: dict[str, Any] = {"prompt": (None, "x"), "input_reference": ("a.png", data)}
    return client.post(path, files=fields | {name: (None, text) for name, text in texts.items()})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_a_good_picture_meets_a_model_that_takes_none(client: httpx.Client, path: str, format: str) -> None:
    data = picture(format)
    url = f"data:image/{format.lower()};base64,{base64.b64encode(data).decode()}"
    for answer in (
        upload(client, data, path),
        client.post(path, json={"prompt": "x", "input_reference": url}),
        client.post(path, files={"prompt": (None, "x"), "input_reference": (None, url)}),
    ):
        error = error_of(answer, 400)
        assert (error["code"], error["param"]) == ("unsupported", "input_reference")
        assert "tiny-wan" in error["message"]


@pytest.mark.parametrize(
    "data",
    [b"x", b"<svg/>", picture("GIF"), picture("PNG")[:-20], bomb(16_000, 9000), text_bomb(), wide_webp()],
    ids=["text", "svg", "gif", "truncated", "bomb", "text bomb", "wide webp"],
)
def test_a_bad_picture_is_said_to_be_one(client: httpx.Client, data: bytes) -> None:
    error = error_of(upload(client, data), 400)
    assert (error["code"], error["param"]) == ("invalid_value", "input_reference")


def test_a_large_picture_is_413_and_one_below_the_limit_is_read(client: httpx.Client) -> None:
    assert error_of(upload(client, bytes(2 * MIB)), 400)["code"] == "invalid_value"  # above that of JSON
    error = error_of(upload(client, bytes(20 * MIB + 1)), 413)
    assert (error["code"], error["param"]) == ("body_too_large", "input_reference")
    assert error_of(upload(client, bytes(22 * MIB)), 413)["code"] == "body_too_large"


def test_the_texts_of_a_form_stay_under_the_limit_of_json(client: httpx.Client) -> None:
    texts = {f"metadata[k{i}]": "x" * 600_000 for i in range(2)}
    assert error_of(upload(client, picture("PNG"), **texts), 413)["code"] == "body_too_large"


def test_other_routes_take_no_uploads(client: httpx.Client) -> None:
    files = {"input_reference": ("a.png", bytes(2 * MIB))}
    answer = client.post(f"/v1/videos/video_{'0' * 32}/cancel", files=files)
    assert error_of(answer, 413)["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("files", "param"),
    [
        ([("prompt", ("a.txt", b"x"))], "prompt"),
        ([("prompt", (None, "x")), ("input", ("a.png", b"x"))], "input"),
        ([("prompt", (None, "x"))] + [("input_reference", ("a.png", picture("PNG")))] * 2, "input_reference"),
        (
            [("prompt", (None, "x")), ("input_reference", (None, "y")), ("input_reference", ("a", b"z"))],
            "input_reference",
        ),
        ([("manifest", (None, "{"))], "manifest"),
        ([("manifest", ("m.json", b"\xff"))], "manifest"),
        ([("manifest", (None, '{"a": 1, "a": 2}'))], "manifest"),
    ],
    ids=range(7),
)
def test_a_part_that_is_wrong_is_named(client: httpx.Client, files: Any, param: str) -> None:
    assert error_of(client.post("/v1/videos", files=files), 400)["param"] == param


def test_an_empty_file_field_of_a_browser_is_no_file(client: httpx.Client) -> None:
    body = b""
    for disposition, text in (('name="prompt"', "x"), ('name="input_reference"; filename=""', "")):
        body += f"--b\r\nContent-Disposition: form-data; {disposition}\r\n\r\n{text}\r\n".encode()
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = client.post("/v1/videos/estimate", content=body + b"--b--\r\n", headers=headers)
    assert answer.status_code == 200, answer.text


HOSTILE_BODIES: list[tuple[bytes, str]] = [
    (b'{"prompt": "a", "prompt": "b"}', "more than once"),
    (b'{"prompt": "a", "attention": {"block_size": 16, "block_size": 32}}', "more than once"),
    (b'{"prompt": "a", "\\ud800": 1, "\\ud800": 2}', "more than once"),
    (b'{"prompt": "\\ud800"}', "JSON"),
    (b'{"\\udfff": "x", "prompt": "a"}', "JSON"),
    (b'{"prompt": "a", "metadata": {"k": "\\udc00\\ud800"}}', "JSON"),
    (b'{"prompt": "a\\u0000b"}', "U+0000"),
    (b'{"prompt": "a\x00b"}', "JSON"),
    (b'{"prompt": "a", "guidance_scale": NaN}', "guidance_scale"),
    (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", ""),
    (b'{"prompt": "a", "seed": -0.0}', "seed"),
    (b'{"prompt": "a", "seed": 1e2}', "seed"),
    (b'{"prompt": "a", "attention": ' + b'{"attention": ' * 2000 + b"1" + b"}" * 2001, ""),
    (b'{"prompt": ' + b"[" * 100_000, "JSON"),
    (b'{"a":' * 100_000, "JSON"),
    (b'\xef\xbb\xbf{"prompt": "a"}', "JSON"),
    ('{"prompt": "a"}'.encode("utf-16"), "JSON"),
    (b'{"prompt": "\xc3\x28"}', "JSON"),
    (b'{"prompt": "a",}', "JSON"),
    (b"{'prompt': 'a'}", "JSON"),
    (b'{"prompt": "a"} {"prompt": "b"}', "JSON"),
    (b'{"__proto__": {}, "prompt": "a"}', "__proto__"),
    (b'{"prompt": {"$gt": ""}}', "prompt"),
    (b'{"prompt": "a", "metadata": {"": "x"}}', "metadata"),
    (b'{"prompt": "a", "metadata": []}', "metadata"),
    (b'{"prompt": "a", "size": "\xd9\xa1\xd9\xa2\xd9\xa8x64"}', "WIDTHxHEIGHT"),
    (b'{"prompt": "a", "model": "../../etc/passwd"}', "not served"),
]


@pytest.mark.parametrize(("body", "hint"), HOSTILE_BODIES, ids=range(len(HOSTILE_BODIES)))
@pytest.mark.parametrize("path", PATHS)
def test_a_hostile_body_is_400(client: httpx.Client, path: str, body: bytes, hint: str) -> None:
    assert hint in error_of(client.post(path, content=body, headers=JSON), 400)["message"]


@pytest.mark.parametrize(
    "prompt",
    ["'; DROP TABLE jobs; --", "\u202e\ufeff\U0001f600\uffff", "%s%n{0}${x}<script>", "\x01\x7f\x1b[2J\r\n"],
)
def test_a_strange_prompt_comes_back_as_it_was(
    server: RunningServer, client: httpx.Client, prompt: str
) -> None:
    job_id = server.submit(prompt=prompt, num_inference_steps=1, metadata={prompt: prompt})["id"]
    job = server.wait_for_job(job_id)
    assert job["status"] == "completed"
    assert (job["prompt"], job["metadata"]) == (prompt, {prompt: prompt})


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "x"])
def test_a_compressed_body_is_415(client: httpx.Client, encoding: str) -> None:
    headers = JSON | {"content-encoding": encoding}
    answer = client.post("/v1/videos", content=b'{"prompt": "x"}', headers=headers)
    assert error_of(answer, 415)["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("idempotency-key", "", 400),
        ("idempotency-key", "x" * 256, 400),
        ("idempotency-key", "\xff\xfe", 202),
        ("x-request-id", "a b\xff", 202),
        ("content-type", "application/json; charset=utf-7", 202),
        ("content-type", "APPLICATION/JSON", 202),
        ("content-type", "", 415),
        ("content-type", "multipart/form-data; boundary=" + "x" * 300, 400),
        ("range", "bytes=" + "9" * 400 + "-", 202),
    ],
)
def test_a_hostile_header(client: httpx.Client, name: str, value: str, status: int) -> None:
    headers = {**JSON, name: value.encode("latin-1")}
    body = json.dumps({"prompt": "x", "num_inference_steps": 1}).encode()
    answer = client.post("/v1/videos", content=body, headers=headers)  # type: ignore[arg-type]
    assert answer.status_code == status, answer.text
    if status == 202:
        client.delete(f"/v1/videos/{answer.json()['id']}")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/videos/",
        "//v1/videos",
        "/v1//videos",
        "/V1/VIDEOS",
        "/v1/videos/..%2f..%2fetc%2fpasswd",
        "/v1/videos/%00",
        "/v1/videos/%ff%fe",
        "/v1/videos/%ed%a0%80",
        "/v1/videos/" + "%2e%2e%2f" * 200 + "/content",
        "/docs/../v1/nothing",
    ],
)
def test_a_strange_path_is_404(client: httpx.Client, path: str) -> None:
    error_of(client.get(path), 404)


@pytest.mark.parametrize(
    "query", ["after=%00", "after=%ff", "limit=1&limit=2&x", "limit=" + "9" * 5000, "%00=1", "status="]
)
def test_a_strange_query_is_400(client: httpx.Client, query: str) -> None:
    error_of(client.get(f"/v1/videos?{query}"), 400)
