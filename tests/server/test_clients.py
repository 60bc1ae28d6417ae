"""The clients that people have: curl, the ``openai`` package and a browser, with and without a key."""

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.browser import Browser
from tests.server.running_server import RunningServer

KEY = "a-key-of-the-tests"
PLAY = """
const video = document.createElement("video");
video.muted = true;
document.body.append(video);
const happens = name => new Promise((done, fail) => {
    video.addEventListener(name, done, {once: true});
    video.addEventListener("error", () => fail(video.error.message), {once: true});
});
const canPlay = happens("canplaythrough");
video.src = source;
await canPlay;
const ended = happens("ended");
await video.play();
await ended;
const frames = video.getVideoPlaybackQuality().totalVideoFrames;
const seeked = happens("seeked");
video.currentTime = video.duration / 2;
await seeked;
return {width: video.videoWidth, height: video.videoHeight, seconds: video.duration,
        frames, at: video.currentTime};
"""


@pytest.fixture(scope="module")
def locked(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that asks for a key."""
    data = tmp_path_factory.mktemp("locked") / "data"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    with RunningServer(data, model_file, "--api-keys-sha256", digest) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        yield running.wait_until_ready()


@pytest.fixture(params=["open", "locked"])
def either(request: pytest.FixtureRequest) -> tuple[RunningServer, str | None]:
    """A server and the key that it asks for."""
    if request.param == "open":
        return request.getfixturevalue("server"), None
    return request.getfixturevalue("locked"), KEY


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium."""
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


def curl(*arguments: str) -> str:
    """What curl prints, errors of HTTP included."""
    command = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "120", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_curl_submits_watches_and_downloads(either: tuple[RunningServer, str | None], tmp_path: Path) -> None:
    server, key = either
    base = f"{server.url}/v1/videos"
    who = () if key is None else ("--header", f"Authorization: Bearer {key}")
    body = '{"prompt": "a red circle", "num_inference_steps": 2}'
    job = json.loads(curl(*who, base, "--header", "Content-Type: application/json", "--data", body))
    events = curl(*who, "--no-buffer", f"{base}/{job['id']}/events")
    assert "event: completed" in events
    shown = json.loads(curl(*who, f"{base}/{job['id']}"))
    assert shown["status"] == "completed"
    curl(*who, f"{base}/{job['id']}/content", "--output", str(tmp_path / "clip.mp4"))
    assert hashlib.sha256((tmp_path / "clip.mp4").read_bytes()).hexdigest() == shown["file"]["sha256"]
    curl(*who, f"{base}/{job['id']}/content", "--range", "4-7", "--output", str(tmp_path / "part"))
    assert (tmp_path / "part").read_bytes() == b"ftyp"
    form = json.loads(curl(*who, base, "--form", "prompt=a red circle", "--form", "num_inference_steps=2"))
    assert form["object"] == "video"
    assert json.loads(curl(*who, "--request", "DELETE", f"{base}/{form['id']}"))["deleted"] is True


def test_curl_without_the_key_is_told_so(locked: RunningServer) -> None:
    error = json.loads(curl(f"{locked.url}/v1/videos"))["error"]
    assert error["code"] == "invalid_api_key"


@pytest.mark.filterwarnings("ignore:The Sora API is scheduled:DeprecationWarning")
def test_openai_package_with_a_key(locked: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=KEY, max_retries=0) as sdk:
        video = sdk.videos.create_and_poll(
            prompt="a red circle", extra_body={"num_inference_steps": 2, "num_frames": 9}
        )
        assert video.status == "completed"
        assert sdk.videos.download_content(video.id).read()[4:8] == b"ftyp"
        assert video.id in [listed.id for listed in sdk.videos.list()]
    with (
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.videos.retrieve(video.id)


def finished(server: RunningServer) -> dict[str, Any]:
    """A finished job."""
    return server.wait_for_job(server.submit(num_inference_steps=2)["id"], "completed")


def check_played(played: dict[str, Any], job: dict[str, Any]) -> None:
    """The browser has shown every frame in the stated size, and seeks."""
    assert "error" not in played, played
    assert (f"{played['width']}x{played['height']}", played["frames"]) == (job["size"], job["num_frames"])
    assert played["seconds"] == pytest.approx(job["num_frames"] / job["fps"], abs=1 / job["fps"])
    assert played["at"] == pytest.approx(played["seconds"] / 2, abs=0.01)


def test_a_browser_plays_the_address_of_the_content(browser: Browser, server: RunningServer) -> None:
    job = finished(server)
    played = browser.run(
        f"{server.url}/health/live", f'const source = "/v1/videos/{job["id"]}/content"; {PLAY}'
    )
    check_played(played, job)


def test_a_browser_with_a_key_plays_what_fetch_brings(browser: Browser, locked: RunningServer) -> None:
    job, page = finished(locked), f"{locked.url}/health/live"
    address = f"/v1/videos/{job['id']}/content"
    plain = browser.run(page, f'const source = "{address}"; {PLAY}')
    assert "error" in plain  # a video element sends no Authorization header
    fetched = f"""
        const answer = await fetch("{address}", {{headers: {{Authorization: "Bearer {KEY}"}}}});
        if (!answer.ok) throw answer.status;
        const source = URL.createObjectURL(await answer.blob());
    """
    check_played(browser.run(page, fetched + PLAY), job)
    assert httpx.get(f"{locked.url}{address}").status_code == 401
