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
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.docker.bare_root import ENTRYPOINT, SCRIPT, UID, BareRoot, install
from tests.docker.compose import compose, services
from tests.docker.dockerfile import REPOSITORY, stages
from tests.postgres import PostgresServer
from tests.server.databases import require_postgres

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
@pytest.mark.parametrize(
    "folder", ["/data", "/cache/huggingface", "/cache/triton", "/cache/inductor", "/files"]
)
def test_a_folder_of_another_user_is_named(bare_root: BareRoot, folder: str) -> None:
    path = bare_root.folder / folder.lstrip("/")
    path.mkdir(exist_ok=True)
    os.chown(path, 0, 0)
    process = bare_root.start("serve", variables={"REELWRIGHT_STORAGE_URL": "file:///files"})
    assert process.wait(timeout=60) == 1
    assert f"reelwright: {folder} is not writable for uid 1000, gid 1000" in bare_root.log
    assert "chown -R 1000:1000" in bare_root.log
    assert list(bare_root.folder.rglob(".writable.*")) == []


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number: int = free.getsockname()[1]
        return number


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def server(bare_root: BareRoot, port: int) -> Iterator[subprocess.Popen[bytes]]:
    variables = {"REELWRIGHT_PORT": str(port), "REELWRIGHT_ALLOW_UNAUTHENTICATED": "true"}
    with _ended(bare_root.start("serve", variables=variables)) as process:
        yield process


@needs_root
def test_serves_the_bundled_model(bare_root: BareRoot, server: subprocess.Popen[bytes], port: int) -> None:
    """One job on what the image holds: no download, no home, nothing writable but the two folders."""
    while not _health_check_passes(bare_root, port):
        assert server.poll() is None, bare_root.log
    assert _owner(server.pid) == UID

    job = _run(bare_root, port, {"prompt": "a red circle moving left on a white background", "seed": 1})
    assert job["status"] == "completed", job["error"]

    server.terminate()
    assert server.wait(timeout=60) == 0, bare_root.log
    assert list(bare_root.data.rglob("*.mp4")) != []
    assert not _health_check_passes(bare_root, port)


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    require_postgres()
    with PostgresServer() as server:
        yield server


@needs_root
def test_api_and_worker_of_the_compose_file_make_a_video(
    bare_root: BareRoot, postgres: PostgresServer, port: int
) -> None:
    """With the commands and variables of docker/compose.cluster.yaml, on an empty database and folder."""
    url = postgres.create_empty()
    (socket_folder,) = parse_qs(urlsplit(url).query)["host"]
    Path(socket_folder).chmod(0o711)
    found = services(
        compose(
            ("compose.cluster.yaml",),
            REPOSITORY,
            profiles=("cluster",),
            REELWRIGHT_DATABASE_URL=url,
            REELWRIGHT_STORAGE_URL="file:///files",
            REELWRIGHT_ALLOW_UNAUTHENTICATED="true",
        )
    )

    def start(name: str) -> subprocess.Popen[bytes]:
        given = {key: value for key, value in found[name]["environment"].items() if value is not None}
        variables = {**given, "REELWRIGHT_PORT": str(port)}
        return bare_root.start(*found[name]["command"], variables=variables, shown=[Path(socket_folder)])

    with _ended(start("api")) as api, _ended(start("worker")) as worker:
        while not _health_check_passes(bare_root, port):
            assert api.poll() is None, bare_root.log
        body = {"prompt": "a red circle", "size": "64x64", "num_frames": 5, "num_inference_steps": 1}
        job = _run(bare_root, port, body)
        assert job["status"] == "completed", job["error"]
        content = _get(port, f"/v1/videos/{job['id']}/content")
        assert sha256(content).hexdigest() == job["file"]["sha256"]
        for process in (api, worker):
            process.terminate()
            assert process.wait(timeout=60) == 0, bare_root.log
    (stored,) = bare_root.files.rglob("*.mp4")
    assert stored.stat().st_uid == UID
    assert list(bare_root.data.rglob("*.mp4")) == []
    assert list(bare_root.data.rglob("*.sqlite3")) == []


def _run(bare_root: BareRoot, port: int, body: dict[str, Any]) -> dict[str, Any]:
    """Submit a job and wait for its end."""
    job = _call(port, "/v1/videos", body)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while job["status"] in {"queued", "in_progress"}:
        assert time.monotonic() < deadline, bare_root.log
        time.sleep(0.2)
        job = _call(port, f"/v1/videos/{job['id']}")
    return job


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


def _get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
        content: bytes = response.read()
        return content
