"""The compose files as Compose itself reads them: schema, includes, overrides and variables."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.settings import Settings
from server.serve import CLOSE_SECONDS
from server.supervisor_handle import STOP_GRACE_SECONDS
from tests.docker.compose import compose, published, seconds, services, settable
from tests.docker.dockerfile import REPOSITORY

CPU = ("compose.yaml", "docker/compose.cpu.yaml")
PUBLIC = ("compose.yaml", "docker/compose.public.yaml")


def _server(*files: str, **variables: str) -> dict[str, Any]:
    found = services(compose(files, REPOSITORY, profiles=(), **variables))
    assert list(found) == ["server"]
    return found["server"]


def test_up_in_the_repository_root_reserves_one_gpu() -> None:
    assert _server("compose.yaml")["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    ]


@pytest.mark.parametrize(("said", "count"), [("4", 4), ("all", -1)])
def test_number_of_gpus_is_one_variable(said: str, count: int) -> None:
    (device,) = _server("compose.yaml", GPU_COUNT=said)["deploy"]["resources"]["reservations"]["devices"]
    assert device["count"] == count
    assert "device_ids" not in device


def test_cpu_override_takes_the_gpu_out_and_the_cpu_build_in() -> None:
    server = _server(*CPU)
    assert "deploy" not in server
    assert server["build"]["args"] == {"TORCH_INDEX_URL": "https://download.pytorch.org/whl/cpu"}
    assert {volume["target"] for volume in server["volumes"]} == {"/cache", "/data", "/models", "/config"}


def test_build_points_at_the_dockerfile() -> None:
    build = _server("compose.yaml")["build"]
    assert Path(build["context"], build["dockerfile"]) == REPOSITORY / "docker/Dockerfile"
    assert "args" not in build
    assert (
        _server("compose.yaml", TORCH_INDEX_URL="https://x")["build"]["args"]["TORCH_INDEX_URL"]
        == "https://x"
    )


def test_stop_waits_longer_than_the_server_takes() -> None:
    server = _server("compose.yaml")
    assert server["init"] is True
    longest_end = Settings().drain_seconds + STOP_GRACE_SECONDS + CLOSE_SECONDS
    assert seconds(server["stop_grace_period"]) > longest_end
    assert seconds(_server("compose.yaml", STOP_GRACE_PERIOD="600s")["stop_grace_period"]) == 600


def test_root_file_system_is_read_only_and_the_volumes_are_named() -> None:
    server = _server("compose.yaml")
    mounts = {volume["target"]: volume for volume in server["volumes"]}
    assert server["read_only"] is True
    assert server["tmpfs"] == ["/tmp:size=1g"]
    assert (mounts["/cache"]["type"], mounts["/cache"]["source"]) == ("volume", "cache")
    assert (mounts["/data"]["type"], mounts["/data"]["source"]) == ("volume", "data")
    assert mounts["/models"]["read_only"] is True


def test_model_is_one_variable() -> None:
    assert _server("compose.yaml")["environment"]["REELWRIGHT_MODEL"] is None
    server = _server("compose.yaml", REELWRIGHT_MODEL="/models/mine", MODELS_FOLDER="/srv/models")
    assert server["environment"]["REELWRIGHT_MODEL"] == "/models/mine"
    assert "/srv/models" in [volume["source"] for volume in server["volumes"]]


def test_every_setting_can_be_given_and_no_other_is() -> None:
    named = {name for name in _server("compose.yaml")["environment"] if name.startswith("REELWRIGHT_")}
    assert named == settable()


def test_a_file_of_settings_is_one_folder_and_one_variable() -> None:
    assert _server("compose.yaml")["environment"]["REELWRIGHT_CONFIG"] is None
    (default,) = [v for v in _server("compose.yaml")["volumes"] if v["target"] == "/config"]
    assert (Path(default["source"]), default["read_only"]) == (REPOSITORY / "docker/config", True)
    server = _server("compose.yaml", REELWRIGHT_CONFIG="/config/mine.yaml", CONFIG_FOLDER="/srv/config")
    assert server["environment"]["REELWRIGHT_CONFIG"] == "/config/mine.yaml"
    assert "/srv/config" in [volume["source"] for volume in server["volumes"]]


def test_published_on_loopback_only_unless_keys_are_asked_for() -> None:
    server = _server("compose.yaml", REELWRIGHT_PORT="9000")
    assert published(server) == [("127.0.0.1", "9000", 8000)]
    assert server["environment"]["REELWRIGHT_ALLOW_UNAUTHENTICATED"] == "true"

    server = _server(*PUBLIC, REELWRIGHT_API_KEYS_SHA256="ab" * 32)
    assert published(server) == [("0.0.0.0", "8000", 8000)]
    assert server["environment"]["REELWRIGHT_ALLOW_UNAUTHENTICATED"] == "false"
    assert server["environment"]["REELWRIGHT_API_KEYS_SHA256"] == "ab" * 32


@pytest.mark.parametrize("keys", [{}, {"REELWRIGHT_API_KEYS_SHA256": ""}])
def test_publishing_without_keys_is_refused(keys: dict[str, str]) -> None:
    result = compose(PUBLIC, REPOSITORY, profiles=(), **keys)
    assert result.returncode != 0
    assert "REELWRIGHT_API_KEYS_SHA256" in result.stderr


def test_a_misspelt_key_would_be_found(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "compose.yaml", tmp_path)
    (tmp_path / "docker").mkdir()
    text = (REPOSITORY / "docker/compose.yaml").read_text(encoding="utf-8")
    (tmp_path / "docker/compose.yaml").write_text(text.replace("shm_size:", "shm_sise:"), encoding="utf-8")
    result = compose(("compose.yaml",), tmp_path)
    assert result.returncode != 0
    assert "shm_sise" in result.stderr
