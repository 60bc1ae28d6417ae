"""The note that a drained slot leaves for its next start."""

from pathlib import Path

import pytest

from server.claims import Claim
from server.drain_note import read_note, remove_note, write_note
from server.files import DataFolder
from tests.server.samples import UNKNOWN_ID


def test_a_note_is_read_until_it_is_removed(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    assert read_note(folder) == set()
    claims = {Claim(UNKNOWN_ID, 1), Claim(UNKNOWN_ID, 2)}
    write_note(folder, claims)
    assert read_note(folder) == read_note(folder) == claims
    assert [path.name for path in tmp_path.iterdir()] == ["drained.json"]
    remove_note(folder)
    remove_note(folder)
    assert read_note(folder) == set()


@pytest.mark.parametrize("text", ["", "{", "7", '[["x"]]', '[["x", "y"]]'])
def test_a_note_that_means_nothing_is_none(tmp_path: Path, text: str) -> None:
    folder = DataFolder(tmp_path)
    folder.drain_note.write_text(text)
    assert read_note(folder) == set()


def test_a_note_that_cannot_be_written_stops_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = DataFolder(tmp_path / "gone")
    write_note(folder, [Claim(UNKNOWN_ID, 1)])
    assert "drain_note_not_written" in capsys.readouterr().out
