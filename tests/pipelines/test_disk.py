"""Files that appear whole or not at all."""

from pathlib import Path

import pytest

from pipelines.disk import written_beside


def test_the_file_appears_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with written_beside(path, ".txt") as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == tmp_path
        assert temporary.name.startswith(".a.")
        assert temporary.name.endswith(".tmp.txt")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_block_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write_half() -> None:
        with written_beside(path, ".txt") as temporary:
            temporary.write_text("ne")
            raise RuntimeError("half")

    with pytest.raises(RuntimeError, match="half"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), written_beside(tmp_path / "a.txt", ".txt"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_longest_name_will_do(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 125 + ".txt")
    with written_beside(path, ".txt") as temporary:
        temporary.write_text("")
    assert list(tmp_path.iterdir()) == [path]
