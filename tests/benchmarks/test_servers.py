"""The benchmarks that start a server: a short run of each, with the tiny model."""

from pathlib import Path

import pytest

from benchmarks import api_load, soak
from server.files import DataFolder
from tests.server.running_server import RunningServer

pytestmark = pytest.mark.alone


def test_soak_accounts_for_memory_and_files(tmp_path: Path, model_file: Path) -> None:
    report = soak.run(tmp_path, str(model_file), jobs=20)
    assert report.statuses == {"completed": 20 + soak.WARM_UP_JOBS}
    assert (report.unknown_files, report.missing_files) == ([], [])
    assert {"api", "supervisor", "worker"} == set(report.memory)
    assert all(found.first_bytes > 10 * 1024 * 1024 for found in report.memory.values())


def test_a_file_of_nobody_is_found(tmp_path: Path, model_file: Path) -> None:
    with RunningServer(tmp_path / "data", str(model_file)) as server:
        job = server.wait_for_job(server.submit()["id"], "completed")
    data = DataFolder(tmp_path / "data")
    stray = data.videos / job["id"] / "9.mp4"
    stray.write_bytes(b"x")
    data.thumbnail(job["id"], 1).unlink()
    assert soak.account(data) == ({"completed": 1}, [str(stray)], [str(data.thumbnail(job["id"], 1))])


def test_api_load_measures_both_servers(tmp_path: Path, model_file: Path) -> None:
    report = api_load.run(tmp_path, str(model_file), clients=10, streams=3, seconds=2.5)
    assert report.reelwright.requests == report.bare.requests >= 10
    assert report.events >= 3
    assert 0 < report.bare.p50_seconds <= report.bare.p99_seconds <= report.bare.max_seconds
