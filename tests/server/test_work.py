"""What ``reelwright worker`` and an API process without a worker cannot start without."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from configs.settings import Settings, SettingsError
from server.serve import serve
from server.work import work

URL = SecretStr("postgresql:///jobs")


def test_sqlite_is_for_one_host(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"reelwright worker needs REELWRIGHT_DATABASE_URL.*one host"):
        work(Settings(data_dir=tmp_path / "data"))
    with pytest.raises(SettingsError, match="REELWRIGHT_LOCAL_WORKER=false needs REELWRIGHT_DATABASE_URL"):
        serve(Settings(data_dir=tmp_path / "data", local_worker=False))
    assert not (tmp_path / "data").exists()


def test_files_must_lie_where_all_find_them(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"reelwright worker needs REELWRIGHT_STORAGE_URL.*file:///folder"
    ):
        work(Settings(data_dir=tmp_path / "data", database_url=URL))
    with pytest.raises(SettingsError, match="REELWRIGHT_LOCAL_WORKER=false needs REELWRIGHT_STORAGE_URL"):
        serve(Settings(data_dir=tmp_path / "data", database_url=URL, local_worker=False))
    assert not (tmp_path / "data").exists()
