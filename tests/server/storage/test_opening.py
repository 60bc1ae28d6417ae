"""Settings of the store."""

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from configs.settings import Settings, SettingsError
from server.files import DataFolder
from server.storage.local import LocalStore
from server.storage.opening import open_objects, open_store


@pytest.mark.parametrize(
    "url", ["s3://clips", "s3://clips/a/b", "gs://clips/a", "az://account/container/a", "file:///mnt/clips"]
)
def test_urls_of_stores(url: str) -> None:
    assert Settings(storage_url=url).storage_url == url
    assert Settings(storage_url=f"{url}/").storage_url == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "clips",
        "s3:/clips",
        "s3://",
        "s3://key:secret@clips/a",
        "s3://clips?region=x",
        "memory:///",
        "file:a",
        "http://host/clips",
        "file://",
    ],
)
def test_other_urls_are_refused_with_an_example(url: str) -> None:
    with pytest.raises(ValidationError, match="s3://bucket/prefix"):
        Settings(storage_url=url)


def test_without_a_url_files_stay_in_the_data_folder(tmp_path: Path) -> None:
    assert isinstance(open_store(Settings(), DataFolder(tmp_path)), LocalStore)


def test_links_need_a_store_that_has_them(tmp_path: Path) -> None:
    settings = Settings(storage_presigned_seconds=60)
    with pytest.raises(SettingsError, match=r"REELWRIGHT_STORAGE_PRESIGNED_SECONDS=60 needs .*STORAGE_URL"):
        open_store(settings, DataFolder(tmp_path))
    with pytest.raises(SettingsError, match="no presigned links; set 0"):
        open_objects(f"file://{tmp_path}/store", 60)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "server.storage.objects", raising=False)
    with pytest.raises(SettingsError, match=r"pip install 'reelwright\[s3\]'"):
        open_objects("s3://clips", 0)
