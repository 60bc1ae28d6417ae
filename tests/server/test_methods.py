"""Methods that a path does not take, and HEAD."""

import httpx
import pytest

from tests.server.routes.test_videos import error_of

ALLOWED = {
    "/v1/videos": {"GET", "HEAD", "POST"},
    f"/v1/videos/video_{'0' * 32}": {"GET", "HEAD", "DELETE"},
    "/health": {"GET", "HEAD"},
}


@pytest.mark.parametrize("path", ALLOWED)
@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
def test_another_method_is_405_and_told_which_are_right(client: httpx.Client, method: str, path: str) -> None:
    answer = client.request(method, path)
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert set(answer.headers["allow"].split(", ")) == ALLOWED[path]


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/videos", "/v1/stats", "/metrics"])
def test_head_is_get_without_a_body(client: httpx.Client, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_head_of_what_is_not_there_is_404(client: httpx.Client) -> None:
    assert client.head("/v1/videos/x").status_code == 404
    assert client.head(f"/v1/videos/video_{'0' * 32}/events").status_code == 405
