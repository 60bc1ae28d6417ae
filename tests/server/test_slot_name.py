"""Names of worker slots."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from configs.settings import Settings
from server.files import DataFolder
from server.slot_name import slot_name


def name_of(folder: Path, url: str | None = "postgresql:///jobs") -> str:
    """The name that a data folder gives."""
    settings = Settings(data_dir=folder, database_url=None if url is None else SecretStr(url))
    return slot_name(settings, DataFolder(folder))


def test_a_folder_keeps_its_name_and_two_have_two(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert name_of(one) == name_of(one)
    assert name_of(one) != name_of(other)
    assert [path.name for path in one.iterdir()] == ["worker_name"]


def test_with_sqlite_there_is_one(tmp_path: Path) -> None:
    assert name_of(tmp_path, None) == "local"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "\n", "two words\n", "a" * 200, "\0\0\0"])
def test_a_name_that_is_none_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "worker_name").write_text(text)
    name = name_of(tmp_path)
    assert name
    assert name == name_of(tmp_path) != text.strip()


def test_a_host_name_of_any_kind_becomes_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Höst name_" + "x" * 300)
    name = name_of(tmp_path)
    assert name.startswith("H-st-name-xxx")
    assert name == name_of(tmp_path)
