"""What makes two submissions the same request, also when the server was updated between them."""

from typing import Any

import pytest
from pydantic import Field

from configs.attention import AttentionOverrides
from server.request_identity import request_sha256
from server.schemas import VideoRequest


class LaterAttention(AttentionOverrides):
    """As a later version may have it."""

    novelty: int = 3


class LaterRequest(VideoRequest):
    """As a later version may have it: another field, another default, another type of number."""

    attention: LaterAttention | None = None
    novelty: str = "on"
    priority: float = Field(default=7.0)  # type: ignore[assignment]


def sha256_of(body: dict[str, Any], model: type[VideoRequest] = VideoRequest) -> str:
    """Of a request with that body."""
    return request_sha256(model.model_validate(body))


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a red circle"},
        {"prompt": "a red circle", "priority": 3, "seconds": 4, "metadata": {"b": "1", "a": "2"}},
        {"prompt": "a red circle", "attention": {"backend": "dense"}},
        {"prompt": "a red circle", "attention": {}},
    ],
)
def test_a_retry_after_an_update_is_the_same_request(body: dict[str, Any]) -> None:
    assert sha256_of(body) == sha256_of(body, LaterRequest)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"seconds": 4}, {"seconds": "4.0"}),
        ({"seed": None}, {}),
        ({"metadata": {"a": "1", "b": "2"}}, {"metadata": {"b": "2", "a": "1"}}),
    ],
)
def test_another_spelling_is_the_same_request(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert sha256_of({"prompt": "x", **one}) == sha256_of({"prompt": "x", **other})


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "y"},
        {"prompt": "x", "seed": 0},
        {"prompt": "x", "seconds": 4},
        {"prompt": "x", "metadata": {"a": "1"}},
        {"prompt": "x", "attention": {"backend": "dense"}},
    ],
)
def test_another_request_is_another(other: dict[str, Any]) -> None:
    assert sha256_of({"prompt": "x"}) != sha256_of(other)
