"""The whole server on an object store, over HTTP; a second API process that redirects to the store."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from configs.settings import Settings
from server.app import create_app
from server.database import open_database
from server.files import DataFolder
from server.lock import FolderLock
from server.model_choice import choose_model
from server.services import build_services
from server.storage.opening import open_store
from server.supervisor import SupervisorStart
from server.supervisor_handle import SupervisorHandle
from tests.server.routes.test_videos import error_of
from tests.server.running_server import RunningServer, free_port
from tests.server.storage.bucket import URL, Bucket
from tests.server.storage.flaky_proxy import FlakyProxy

pytestmark = pytest.mark.alone
SMALL = {"num_inference_steps": 2, "seed": 3}


@pytest.fixture(scope="module")
def proxy(s3: Bucket) -> Iterator[FlakyProxy]:
    """Between the server and the bucket."""
    s3.empty()
    with FlakyProxy(s3.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Database and scratch folder."""
    return tmp_path_factory.mktemp("stored") / "data"


def start(s3: Bucket, proxy: FlakyProxy, data_dir: Path, model_file: Path) -> RunningServer:
    """A server that stores in the bucket."""
    return RunningServer(data_dir, model_file, "--storage-url", URL, env=s3.variables(proxy.port))


@contextmanager
def another_api(data_dir: Path, model_file: Path) -> Iterator[httpx.Client]:
    """A second API on the same database, without a supervisor, that redirects downloads for a minute."""
    settings = Settings(
        data_dir=data_dir, model=str(model_file), storage_url=URL, storage_presigned_seconds=60
    )
    preset, attention = choose_model(settings)
    database, store = open_database(settings), open_store(settings, DataFolder(data_dir))
    unused = SupervisorHandle(SupervisorStart(settings, preset, FolderLock(-1)))
    services = build_services(settings, preset, attention, database, store, unused)
    port = free_port()
    config = uvicorn.Config(create_app(services), port=port, lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        give_up_at = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < give_up_at
            time.sleep(0.02)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()
        services.database.close()


def test_a_job_from_submission_to_removal(
    s3: Bucket, proxy: FlakyProxy, data_dir: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.variables(proxy.port).items():
        monkeypatch.setenv(name, value)
    with start(s3, proxy, data_dir, model_file) as server:
        server.wait_until_ready()
        job_id = server.submit(**SMALL)["id"]
        events = server.client.get(f"/v1/videos/{job_id}/events").text
        assert "event: completed" in events
        job = server.job(job_id)
        path = f"/v1/videos/{job_id}/content"
        whole = s3.read(f"videos/{job_id}/1.mp4").content
        _check_proxied(server.client, path, whole, job["file"]["sha256"])
        with another_api(data_dir, model_file) as other:
            _check_redirected(other, path, whole, job["file"]["sha256"])
        manifest = server.client.get(f"/v1/videos/{job_id}/manifest")
        assert manifest.status_code == 200
        _check_store_gone(server, proxy, path)

        # Everything is killed while a finished file is on its way.
        proxy.hold("1.mp4")
        second = server.submit(**SMALL)["id"]
        server.wait_for(proxy.is_holding.is_set)
        os.kill(server.worker()["worker_pid"], signal.SIGKILL)
        assert server.job(second)["stage"] == "store"
        assert server.client.delete(f"/v1/videos/{job_id}").json()["deleted"] is True
        assert [name for name in s3.names() if job_id in name] == []
        assert error_of(server.client.get(path), 404)["code"] == "not_found"
    with start(s3, proxy, data_dir, model_file) as again:
        assert again.job(second)["status"] == "in_progress"
        proxy.release()
        done = again.wait_for_job(second, "completed")
        content = again.client.get(f"/v1/videos/{second}/content").content
        assert len(content) == done["file"]["bytes"]
        again.wait_for(lambda: not (data_dir / "videos" / second).exists())
        again.wait_for(lambda: all(name.startswith(f"videos/{second}/1.") for name in s3.names()))
        assert {name.rpartition("/")[2] for name in s3.names()} == {
            *("1.mp4", "1.thumbnail.jpg", "1.spritesheet.jpg")
        }
        again.client.delete(f"/v1/videos/{second}")
        assert s3.names() == []


def _check_proxied(client: httpx.Client, path: str, whole: bytes, sha256: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.content) == (200, whole)
    etag = answer.headers["etag"]
    assert etag == f'"{sha256}"'
    part = client.get(path, headers={"range": "bytes=5-99", "if-range": etag})
    assert (part.status_code, part.content) == (206, whole[5:100])
    assert part.headers["content-range"] == f"bytes 5-99/{len(whole)}"
    assert client.get(path, headers={"range": "bytes=5-", "if-range": '"other"'}).content == whole
    assert client.get(path, headers={"if-none-match": etag}).status_code == 304
    assert client.get(path, headers={"range": f"bytes={len(whole)}-"}).status_code == 416
    head = client.head(path)
    assert (head.status_code, int(head.headers["content-length"])) == (200, len(whole))
    for variant in ("thumbnail", "spritesheet"):
        picture = client.get(path, params={"variant": variant})
        assert (picture.status_code, picture.headers["content-type"]) == (200, "image/jpeg")


def _check_redirected(client: httpx.Client, path: str, whole: bytes, sha256: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, answer.headers["cache-control"]) == (307, "no-store")
    at_store = httpx.get(answer.headers["location"], headers={"range": "bytes=5-99"})
    assert (at_store.status_code, at_store.content) == (206, whole[5:100])
    followed = client.get(path, follow_redirects=True)
    assert followed.content == whole
    assert followed.headers["content-type"] == "video/mp4"
    etag = f'"{sha256}"'
    assert client.head(path).headers["etag"] == etag
    assert client.get(path, headers={"if-none-match": etag}).status_code == 304
    assert client.get(path, headers={"range": f"bytes={len(whole)}-"}).status_code == 416
    resumed = client.get(path, headers={"range": "bytes=5-", "if-range": etag})
    assert (resumed.status_code, resumed.content) == (206, whole[5:])


def _check_store_gone(server: RunningServer, proxy: FlakyProxy, path: str) -> None:
    proxy.is_down = True
    answer = server.client.get(path, timeout=60)
    proxy.is_down = False
    assert error_of(answer, 503)["code"] == "storage_unavailable"
    assert "retry-after" in answer.headers
