"""One server per file of this folder; its tests hurt it, and leave it sound."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.faults.faulty_server import FaultyServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[FaultyServer]":
    """A ready server with the bundled model."""
    from tests.faults.faulty_server import FaultyServer  # GPU hosts lack parts of the server

    folder: Path = tmp_path_factory.mktemp("faults")
    with FaultyServer(folder / "data") as running:
        yield running.wait_until_ready()
