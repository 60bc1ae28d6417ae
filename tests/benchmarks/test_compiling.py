"""Every job is done when the block ends, and a failure is not lost."""

from pathlib import Path

import pytest

from benchmarks.compiling import compiling


def test_all_jobs_have_ended(tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(3)]
    with compiling(Path.touch, paths):
        pass
    assert all(path.exists() for path in paths)


def test_a_failure_is_raised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), compiling(Path.touch, [tmp_path / "no" / "folder"]):
        pass
