"""One server per file of this folder; its tests hurt it, and leave it sound."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.faulty_server import FaultyServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    """A ready server with the bundled model."""
    folder: Path = tmp_path_factory.mktemp("faults")
    with FaultyServer(folder / "data") as running:
        yield running.wait_until_ready()
