"""The tiny model as a preset file, and one server that the tests of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from configs.model_preset import ModelPreset
from server.claims import ClaimTable
from server.database import Database, migrate
from server.jobs import JobTable
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


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """An empty job database."""
    migrate(tmp_path / "jobs.sqlite3")
    database = Database(tmp_path / "jobs.sqlite3")
    yield database
    database.close()


@pytest.fixture
def jobs(database: Database) -> JobTable:
    """The HTTP side of that database."""
    return JobTable(database)


@pytest.fixture
def claims(database: Database) -> ClaimTable:
    """The worker's side of that database."""
    return ClaimTable(database)
