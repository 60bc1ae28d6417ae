"""Downloading the MP4."""

import hashlib
from pathlib import Path

import httpx
import pytest

from pipelines import probe_mp4
from tests.server.routes.test_videos import error_of
from tests.server.running_server import RunningServer


@pytest.fixture(scope="module")
def video_id(server: RunningServer) -> str:
    """A finished video."""
    return str(server.wait_for_job(server.submit(seed=3)["id"], "completed")["id"])


@pytest.fixture(scope="module")
def content(client: httpx.Client, video_id: str) -> httpx.Response:
    """Its whole content."""
    return client.get(f"/v1/videos/{video_id}/content")


def test_the_file_is_whole_and_plays(
    server: RunningServer, content: httpx.Response, video_id: str, tmp_path: Path
) -> None:
    file = server.job(video_id)["file"]
    assert content.status_code == 200
    assert content.headers["content-type"] == "video/mp4"
    assert int(content.headers["content-length"]) == len(content.content) == file["bytes"]
    assert content.headers["etag"] == f'"{file["sha256"]}"'
    assert content.headers["accept-ranges"] == "bytes"
    assert content.headers["content-disposition"] == f'inline; filename="{video_id}.mp4"'
    assert hashlib.sha256(content.content).hexdigest() == file["sha256"]
    path = tmp_path / "video.mp4"
    path.write_bytes(content.content)
    probed = probe_mp4(path)
    assert (probed.frames, probed.width, probed.height, probed.fps) == (9, 64, 64, 8.0)


@pytest.mark.parametrize(
    ("header", "start", "stop"), [("bytes=0-99", 0, 100), ("bytes=100-", 100, None), ("bytes=-7", -7, None)]
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_range(
    client: httpx.Client,
    content: httpx.Response,
    video_id: str,
    header: str,
    start: int,
    stop: int | None,
    method: str,
) -> None:
    answer = client.request(method, f"/v1/videos/{video_id}/content", headers={"range": header})
    whole = content.content
    expected = whole[start:stop]
    first = start % len(whole)
    assert answer.status_code == 206
    assert answer.headers["content-range"] == f"bytes {first}-{first + len(expected) - 1}/{len(whole)}"
    assert int(answer.headers["content-length"]) == len(expected)
    assert answer.content == (expected if method == "GET" else b"")


def test_head_has_the_headers_of_get(client: httpx.Client, content: httpx.Response, video_id: str) -> None:
    answer = client.head(f"/v1/videos/{video_id}/content")
    assert answer.status_code == 200
    assert answer.content == b""
    volatile = {"date", "x-request-id"}
    assert {k: v for k, v in answer.headers.items() if k not in volatile} == {
        k: v for k, v in content.headers.items() if k not in volatile
    }


def test_a_range_outside_the_file_is_416(
    client: httpx.Client, content: httpx.Response, video_id: str
) -> None:
    answer = client.get(f"/v1/videos/{video_id}/content", headers={"range": "bytes=999999999-"})
    assert error_of(answer, 416)["code"] == "range_not_satisfiable"
    assert answer.headers["content-range"] == f"bytes */{len(content.content)}"


@pytest.mark.parametrize("header", ["bytes=0-1,5-6", "bytes=x", "lines=1-2"])
def test_several_ranges_or_nonsense_get_the_whole_file(
    client: httpx.Client, content: httpx.Response, video_id: str, header: str
) -> None:
    answer = client.get(f"/v1/videos/{video_id}/content", headers={"range": header})
    assert (answer.status_code, answer.content) == (200, content.content)


def test_a_download_is_resumed_only_if_the_file_is_the_same(
    client: httpx.Client, content: httpx.Response, video_id: str
) -> None:
    for if_range, status in (
        (content.headers["etag"], 206),
        (content.headers["last-modified"], 206),
        ('"another"', 200),
    ):
        headers = {"range": "bytes=5-", "if-range": if_range}
        assert client.get(f"/v1/videos/{video_id}/content", headers=headers).status_code == status


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_known_file_is_not_sent_again(
    client: httpx.Client, content: httpx.Response, video_id: str, method: str
) -> None:
    headers = {"if-none-match": content.headers["etag"]}
    answer = client.request(method, f"/v1/videos/{video_id}/content", headers=headers)
    assert (answer.status_code, answer.content) == (304, b"")
    assert answer.headers["etag"] == content.headers["etag"]


def test_an_unfinished_video_is_409(server: RunningServer, client: httpx.Client) -> None:
    job_id = server.submit_long()["id"]
    answer = client.get(f"/v1/videos/{job_id}/content")
    assert error_of(answer, 409)["code"] == "not_ready"
    client.post(f"/v1/videos/{job_id}/cancel")
    server.wait_for_job(job_id, "cancelled")
    assert error_of(client.get(f"/v1/videos/{job_id}/content"), 409)["code"] == "no_content"
    assert client.head(f"/v1/videos/{job_id}/content").status_code == 409


def test_a_variant_that_does_not_exist_is_named(client: httpx.Client, video_id: str) -> None:
    answer = client.get(f"/v1/videos/{video_id}/content", params={"variant": "hologram"})
    assert error_of(answer, 400)["param"] == "variant"


@pytest.mark.parametrize("kept_bytes", [None, 0, 100])
def test_a_file_that_is_not_whole_any_more_is_410(
    server: RunningServer, client: httpx.Client, kept_bytes: int | None
) -> None:
    job_id = server.submit()["id"]
    server.wait_for_job(job_id, "completed")
    path = server.data_dir / "videos" / job_id / "1.mp4"
    if kept_bytes is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:kept_bytes])
    for headers in ({}, {"range": "bytes=0-9"}):
        answer = client.get(f"/v1/videos/{job_id}/content", headers=headers)
        assert error_of(answer, 410)["code"] == "file_missing"
