"""What the image installs: every file of the packages is in the wheel, code and data alike."""

import zipfile
from pathlib import Path

from tests.docker.dockerfile import REPOSITORY

PACKAGES = ("attention", "configs", "pipelines", "server")


def _files_of_the_checkout() -> set[str]:
    paths = (path for package in PACKAGES for path in (REPOSITORY / package).rglob("*") if path.is_file())
    return {str(path.relative_to(REPOSITORY)) for path in paths if "__pycache__" not in path.parts}


def test_holds_every_file_of_the_packages(wheel: Path) -> None:
    expected = _files_of_the_checkout()
    assert {
        "server/sql/sqlite/001_jobs.sql",
        "server/sql/postgres/001_jobs.sql",
        "configs/models/reelwright-shapes.yaml",
    } <= expected
    with zipfile.ZipFile(wheel) as archive:
        assert expected - set(archive.namelist()) == set()


def test_holds_no_tests_and_no_benchmarks(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
