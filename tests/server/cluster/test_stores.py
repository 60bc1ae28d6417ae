"""What several hosts may share, and what they may not: real processes, a real PostgreSQL and a real S3."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.storage.marker import NAME
from tests.faults import processes
from tests.postgres import PostgresServer
from tests.server.cluster.processes import MODEL, SCRIPTED, Cluster, RunningWorker, local_cluster, stored
from tests.server.running_server import RunningServer
from tests.server.storage.bucket import URL, Bucket
from tests.server.storage.flaky_proxy import FlakyProxy

pytestmark = pytest.mark.alone

# Beside the tests' patience; the store answers nothing for as long as the test holds it.
STOP_SECONDS = 10.0


@pytest.fixture
def cluster(tmp_path: Path, postgres: PostgresServer) -> Iterator[Cluster]:
    """Nothing runs in it yet."""
    with postgres.database() as url, local_cluster(tmp_path, url) as made:
        yield made


def refused(folder: Path, *command: str) -> str:
    """What a process says that does not start."""
    program = RunningWorker(folder, command[1:], {}, SCRIPTED)
    program._command[program._command.index("worker")] = command[0]
    program.start()
    assert program.wait_for_end() == 1
    return program.logged()


def test_a_second_database_gets_no_part_of_a_store(
    cluster: Cluster, postgres: PostgresServer, tmp_path: Path
) -> None:
    api, worker = cluster.api(), cluster.worker("--model", MODEL)
    cluster.wait_until_ready(worker)
    job_id = str(api.submit(prompt="denoise finish")["id"])
    assert api.wait_for_job(job_id)["status"] == "completed"
    files = stored(tmp_path)
    flags = ("--storage-url", cluster.storage_url, "--model", MODEL, "--device", "cpu")
    with postgres.database() as second:
        for command in (("worker",), ("serve", "--port", "0", "--no-local-worker"), ("serve", "--port", "0")):
            said = refused(tmp_path / f"second{len(command)}", *command, "--database-url", second, *flags)
            assert "the store belongs to the database postgresql://" in said
            for url in (cluster.database_url, second):
                assert f"/{url.partition('@/')[2].partition('?')[0]} (id " in said
            assert NAME in said
            assert "Traceback" not in said
    assert stored(tmp_path) == files


def test_a_second_host_without_a_store_does_not_start(cluster: Cluster, tmp_path: Path) -> None:
    database = ("--database-url", cluster.database_url)
    common = (*database, "--model", MODEL, "--device", "cpu")
    with RunningServer(tmp_path / "first", MODEL, *database) as first:
        first.wait_until_ready()
        said = refused(tmp_path / "second", "serve", "--port", "0", *common)
        assert "keeps its files in its own data folder" in said
        assert "REELWRIGHT_STORAGE_URL on every host" in said
        said = refused(tmp_path / "third", "worker", *common, "--storage-url", cluster.storage_url)
        assert "keeps its files in its own data folder" in said
        first.signal(signal.SIGTERM)
        assert first.wait_for_end() == 0
    with RunningServer(tmp_path / "second", MODEL, *database) as second:  # the first has said that it ends
        second.wait_until_ready()


def test_a_store_that_hangs_holds_up_neither_the_stop_nor_the_housekeeping(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    with (
        Bucket() as bucket,
        FlakyProxy(bucket.port) as proxy,
        postgres.database() as url,
        Cluster(tmp_path, url, URL, env=bucket.variables(proxy.port)) as cluster,
    ):
        bucket.empty()
        worker = cluster.worker("--retention-seconds", "3")
        api = cluster.api()
        cluster.wait_until_ready(worker)
        first = str(api.submit(prompt="denoise finish")["id"])
        assert api.wait_for_job(first)["status"] == "completed"
        worker.kill()
        proxy.hold("list-type")
        processes.wait_until(lambda: api.client.get(f"/v1/videos/{first}").status_code == 404, "it expired")
        processes.wait_until(proxy.is_holding.is_set, "its files are asked for")
        started = time.monotonic()
        api.signal(signal.SIGTERM)
        assert api.wait_for_end() == 0
        assert time.monotonic() - started < STOP_SECONDS
        assert "Traceback" not in api.log.read_text()
