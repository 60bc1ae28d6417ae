"""docker/entrypoint.sh as an ordinary user on a read-only root: what it refuses and what it starts."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docker.bare_root import ENTRYPOINT, SCRIPT, UID, BareRoot, install
from tests.docker.dockerfile import stages

PATIENCE_SECONDS = 240

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None,
    reason="building a bare root file system needs Linux, root and unshare",
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    folder = tmp_path_factory.mktemp("image") / "environment"
    install(wheel, folder)
    return folder


@pytest.fixture
def bare_root(tmp_path: Path, environment: Path) -> BareRoot:
    return BareRoot(environment, tmp_path)


def test_shellcheck_finds_nothing() -> None:
    command = [Path(sys.executable).with_name("shellcheck"), ENTRYPOINT, SCRIPT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@needs_root
@pytest.mark.parametrize("folder", ["/data", "/cache/huggingface", "/cache/triton", "/cache/inductor"])
def test_a_folder_of_another_user_is_named(bare_root: BareRoot, folder: str) -> None:
    path = bare_root.folder / folder.lstrip("/")
    path.mkdir(exist_ok=True)
    os.chown(path, 0, 0)
    process = bare_root.start("serve", variables={})
    assert process.wait(timeout=60) == 1
    assert f"reelwright: {folder} is not writable for uid 1000, gid 1000" in bare_root.log
    assert "chown -R 1000:1000" in bare_root.log
    assert list(bare_root.folder.rglob(".writable.*")) == []


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number: int = free.getsockname()[1]
        return number


@pytest.fixture
def server(bare_root: BareRoot, port: int) -> Iterator[subprocess.Popen[bytes]]:
    variables = {"REELWRIGHT_PORT": str(port), "REELWRIGHT_ALLOW_UNAUTHENTICATED": "true"}
    process = bare_root.start("serve", variables=variables)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@needs_root
def test_serves_the_bundled_model(bare_root: BareRoot, server: subprocess.Popen[bytes], port: int) -> None:
    """One job on what the image holds: no download, no home, nothing writable but the two folders."""
    while not _health_check_passes(bare_root, port):
        assert server.poll() is None, bare_root.log
    assert _owner(server.pid) == UID

    job = _call(port, "/v1/videos", {"prompt": "a red circle moving left on a white background", "seed": 1})
    deadline = time.monotonic() + PATIENCE_SECONDS
    while job["status"] in {"queued", "in_progress"}:
        assert time.monotonic() < deadline, bare_root.log
        time.sleep(0.2)
        job = _call(port, f"/v1/videos/{job['id']}")
    assert job["status"] == "completed", job["error"]

    server.terminate()
    assert server.wait(timeout=60) == 0, bare_root.log
    assert list(bare_root.data.rglob("*.mp4")) != []
    assert not _health_check_passes(bare_root, port)


def _health_check_passes(bare_root: BareRoot, port: int) -> bool:
    python, *arguments = stages()[-1].only("HEALTHCHECK").json_form
    assert python == "python"
    variables = {"REELWRIGHT_PORT": str(port)}
    result = subprocess.run(
        [bare_root.python, *arguments], env=variables, stderr=subprocess.DEVNULL, check=False
    )
    return result.returncode == 0


def _owner(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def _call(port: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        answer: dict[str, Any] = json.load(response)
        return answer
