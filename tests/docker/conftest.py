"""The project's wheel, built from nothing but the files that docker/Dockerfile copies for it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.dockerfile import REPOSITORY, stages


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in stages()[0].copied():
        if name.endswith("/"):
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(REPOSITORY / name, source / name, ignore=ignore)
        else:
            shutil.copy(REPOSITORY / name, source)
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            folder,
            source,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = folder.glob("*.whl")
    return built
