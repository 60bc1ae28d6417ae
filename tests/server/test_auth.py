"""API keys and foreign web pages."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from configs.settings import SettingsError
from configs.sources import load_settings
from server.auth import HEALTH_PATHS
from tests.server.routes.test_videos import error_of
from tests.server.running_server import RunningServer

KEYS = ("first-key", "second-key")
DIGESTS = ",".join(hashlib.sha256(key.encode()).hexdigest() for key in KEYS)


@pytest.fixture(scope="module")
def locked(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that asks for a key, on every address of the machine."""
    env = {"REELWRIGHT_API_KEYS_SHA256": DIGESTS, "REELWRIGHT_OPEN_METRICS": "true"}
    folder = tmp_path_factory.mktemp("locked") / "data"
    with RunningServer(folder, model_file, "--host", "0.0.0.0", env=env) as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/v1/videos"),
        ("POST", "/v1/videos"),
        ("DELETE", "/v1/videos/x"),
        ("GET", "/v1/stats"),
        ("GET", "/v1/nothing"),
        ("OPTIONS", "/v1/videos"),
        ("GET", "/health/live/"),
        ("GET", "//health/live"),
        ("GET", "/health/../v1/videos"),
    ],
)
@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key2"]
)
def test_without_a_valid_key_nothing_is_open(
    locked: RunningServer, method: str, path: str, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    answer = locked.client.request(method, path, headers=headers)
    error = error_of(answer, 401)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(locked: RunningServer, key: str) -> None:
    answer = locked.client.get("/v1/videos", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", [*sorted(HEALTH_PATHS - {"/health", "/health/ready"}), "/metrics"])
def test_open_paths_need_no_key(locked: RunningServer, path: str) -> None:
    assert locked.client.get(path).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "", "http://[", "http://[::1", "\xe9"])
def test_a_page_of_another_origin_cannot_submit(client: httpx.Client, origin: str) -> None:
    headers = [(b"origin", origin.encode("latin-1"))]
    answer = client.post("/v1/videos", files={"prompt": (None, "x")}, headers=headers)
    assert error_of(answer, 403)["code"] == "cross_origin"
    assert client.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "[evil]", ""]
)
def test_a_page_whose_name_resolves_to_this_machine_sees_nothing(client: httpx.Client, host: str) -> None:
    headers = {"host": host, "origin": f"http://{host}"}
    assert error_of(client.get("/v1/videos", headers=headers), 403)["code"] == "cross_origin"
    answer = client.post("/v1/videos", json={"prompt": "x"}, headers=headers)
    assert error_of(answer, 403)["code"] == "cross_origin"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "10.1.2.3:80", "[::1]", "[::1]:8000"]
)
def test_names_that_no_stranger_can_own_are_welcome(client: httpx.Client, host: str) -> None:
    headers = {"host": host, "origin": f"http://{host}"}
    assert client.get("/v1/videos", headers=headers).status_code == 200
    assert error_of(client.post("/v1/videos", json={}, headers=headers), 400)["code"] == "missing_field"


def test_every_host_is_welcome_to_who_has_a_key(locked: RunningServer) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}", "host": "videos.example"}
    assert locked.client.get("/v1/videos", headers=headers).status_code == 200


def test_the_servers_own_page_can_submit(client: httpx.Client) -> None:
    own = str(client.base_url).rstrip("/")
    assert client.post("/v1/videos", json={}, headers={"origin": own}).status_code == 400


@pytest.mark.parametrize("value", ["first-key", "abc", "z" * 64])
def test_a_key_that_is_no_hash_is_not_echoed(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REELWRIGHT_API_KEYS_SHA256", value)
    with pytest.raises(SettingsError) as caught:
        load_settings({})
    assert "sha256sum" in str(caught.value)
    assert value not in str(caught.value)
