"""Which engine the settings choose, and what is said when it cannot be used."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from configs.settings import Settings, SettingsError
from server.database import SqliteDatabase, open_database

URL = SecretStr("postgresql://user:secret@host.invalid/jobs")


def test_without_a_url_it_is_the_file_of_the_data_folder(tmp_path: Path) -> None:
    database = open_database(Settings(data_dir=tmp_path))
    assert isinstance(database, SqliteDatabase)
    assert database.path == tmp_path / "jobs.sqlite3"


@pytest.mark.parametrize("missing", ["procrastinate", "psycopg_pool"])
def test_a_missing_package_is_named_with_its_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "server.database.postgres", raising=False)
    monkeypatch.delitem(sys.modules, "server.database.procrastinate_queue", raising=False)
    with pytest.raises(SettingsError, match=rf"{missing}.*pip install 'reelwright\[postgres\]'"):
        open_database(Settings(database_url=URL))


def test_sqlite_loads_nothing_of_postgresql(tmp_path: Path) -> None:
    program = (
        "import sys; from configs.settings import Settings; from server.database import open_database; "
        "open_database(Settings()).migrate(); print(sorted({'psycopg', 'procrastinate'} & set(sys.modules)))"
    )
    environment = {"REELWRIGHT_DATA_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"
