"""The ``openai`` package works without special-casing."""

import hashlib
from collections.abc import Iterator

import openai
import pytest

from tests.server.running_server import RunningServer

# The package marks its whole video API as deprecated, because its own service for it has closed.
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API is scheduled:DeprecationWarning")


@pytest.fixture
def sdk(server: RunningServer) -> Iterator[openai.OpenAI]:
    """The package's client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


def test_create_poll_download_and_delete(sdk: openai.OpenAI, server: RunningServer) -> None:
    video = sdk.videos.create_and_poll(
        prompt="a red circle",
        model="tiny-wan",
        seconds="4",
        size="64x64",  # type: ignore[arg-type]
        extra_body={"fps": 8, "attention": {"block_size": 16, "dense_layers": [0, 1]}},
    )
    assert (video.status, video.progress, video.object) == ("completed", 100, "video")
    assert (video.model, video.size, video.seconds) == ("tiny-wan", "64x64", "4.125")
    assert video.error is None
    shown = server.job(video.id)
    assert shown["attention"]["resolved"]["dense_layers"] == [0, 1]
    content = sdk.videos.download_content(video.id).read()
    assert hashlib.sha256(content).hexdigest() == shown["file"]["sha256"]
    deleted = sdk.videos.delete(video.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (video.id, True, "video.deleted")
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.videos.retrieve(video.id)
    assert caught.value.code == "not_found"


def test_list_pages_by_itself(sdk: openai.OpenAI, server: RunningServer) -> None:
    ids = [server.submit(num_inference_steps=1)["id"] for _ in range(3)]
    listed = [video.id for video in sdk.videos.list(limit=2)]
    assert listed[:3] == ids[::-1]
    assert len(listed) == len(set(listed))
    assert [video.id for video in sdk.videos.list(limit=100, order="asc")] == listed[::-1]
    server.wait_for_job(ids[-1])


def test_a_refusal_names_the_parameter(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.videos.create(prompt="a red circle", model="sora-2")
    assert (caught.value.param, caught.value.code) == ("model", "unknown_model")
    assert "tiny-wan" in caught.value.message


def test_models_are_listed(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["tiny-wan"]
