"""The health checks over HTTP."""

from pathlib import Path

import httpx
import pytest
import yaml

from configs.model_preset import ModelPreset
from tests.server.running_server import RunningServer


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_a_ready_server_is_healthy(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "reason": None, "warnings": []})


def test_a_server_whose_model_does_not_load_lives_and_says_why(preset: ModelPreset, tmp_path: Path) -> None:
    missing = preset.model_copy(update={"source": str(tmp_path / "nothing")})
    file = tmp_path / "missing.yaml"
    file.write_text(yaml.safe_dump(missing.model_dump(mode="json")), encoding="utf-8")
    with RunningServer(tmp_path / "data", file) as server:
        server.wait_for(lambda: "load_failed" in server.client.get("/health").text)
        assert server.client.get("/health/live").status_code == 200
        for path in ("/health", "/health/ready"):
            answer = server.client.get(path)
            assert answer.status_code == 503
            body = answer.json()
            assert body["status"] == "unavailable"
            assert body["error"] == {
                "message": body["reason"],
                "type": "server_error",
                "param": None,
                "code": "not_ready",
            }


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("PYTHONPATH", "{folder}", "imageio_ffmpeg is half installed"),
        ("IMAGEIO_FFMPEG_EXE", "{folder}/absent", "ffmpeg ({folder}/absent) cannot be run"),
    ],
)
def test_an_installation_that_lacks_something_takes_no_jobs(
    model_file: Path, tmp_path: Path, variable: str, value: str, reason: str
) -> None:
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "imageio_ffmpeg.py").write_text("raise ImportError('imageio_ffmpeg is half installed')")
    env = {variable: value.format(folder=folder)}
    with RunningServer(tmp_path / "data", model_file, env=env) as server:
        server.wait_for(lambda: "load_failed" in server.client.get("/health").text)
        answer = server.client.get("/health/ready")
        assert answer.status_code == 503
        assert reason.format(folder=folder) in answer.json()["reason"]
