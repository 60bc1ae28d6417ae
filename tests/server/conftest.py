"""The tiny model as a preset file, and one server that the tests of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from configs.model_preset import ModelPreset
from server.claims import ClaimTable
from server.database import Database
from server.jobs import JobTable
from tests.postgres import PostgresServer
from tests.server.databases import ENGINES, Clock, JobDatabase, job_database, require_postgres
from tests.server.running_server import RunningServer
from tests.tiny_wan import tiny_preset, write_tiny_wan


@pytest.fixture(scope="session")
def preset(tmp_path_factory: pytest.TempPathFactory) -> ModelPreset:
    """The tiny model, with steps enough for a job that can be interrupted."""
    preset = tiny_preset(write_tiny_wan(tmp_path_factory.mktemp("models") / "tiny"))
    limits = preset.limits.model_copy(update={"max_num_inference_steps": 1000})
    return preset.model_copy(update={"limits": limits})


@pytest.fixture(scope="session")
def model_file(preset: ModelPreset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The preset as a file, for ``--model``."""
    path = tmp_path_factory.mktemp("presets") / "tiny.yaml"
    path.write_text(yaml.safe_dump(preset.model_dump(mode="json")), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def server(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A ready server. Tests must not kill parts of it."""
    with RunningServer(tmp_path_factory.mktemp("shared") / "data", model_file) as running:
        yield running.wait_until_ready()


@pytest.fixture(scope="session")
def client(server: RunningServer) -> httpx.Client:
    """A client of the shared server."""
    return server.client


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server for the tests of this process."""
    require_postgres()
    with PostgresServer() as server:
        yield server


@pytest.fixture(params=ENGINES)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobDatabase]:
    """An empty job database of either engine."""
    engine: str = request.param
    with job_database(engine, tmp_path, lambda: request.getfixturevalue("postgres")) as made:
        yield made


@pytest.fixture
def database(made: JobDatabase) -> Database:
    """The same, open."""
    return made.database


@pytest.fixture
def clock(made: JobDatabase, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that it goes by."""
    return Clock(made, monkeypatch)


@pytest.fixture
def jobs(database: Database) -> JobTable:
    """The HTTP side of that database."""
    return JobTable(database)


@pytest.fixture
def claims(database: Database) -> ClaimTable:
    """The worker's side of that database."""
    return ClaimTable(database)
