"""What a server or worker refuses to start on."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from configs.settings import Settings
from server.files import DataFolder
from server.starting import StartError, migrated_database, open_slot


def test_a_folder_with_the_jobs_of_another_database_is_refused(tmp_path: Path) -> None:
    """All its videos would be removed, as unknown."""
    with_sqlite = Settings(data_dir=tmp_path / "a")
    with_postgres = Settings(data_dir=tmp_path / "a", database_url=SecretStr("postgresql://nowhere/a"))
    open_slot(with_sqlite, DataFolder(tmp_path / "a")).lock.release()
    migrated_database(with_sqlite).close()
    with pytest.raises(StartError, match="without database_url; with it, choose another data_dir"):
        open_slot(with_postgres, DataFolder(tmp_path / "a"))

    open_slot(with_postgres, DataFolder(tmp_path / "b")).lock.release()
    with pytest.raises(StartError, match="belongs to a database_url; without it, choose another data_dir"):
        open_slot(with_sqlite, DataFolder(tmp_path / "b"))
