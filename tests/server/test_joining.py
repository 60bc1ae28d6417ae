"""Whether a process may use a database that others use already."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.settings import Settings
from server.database import Database
from server.joining import join
from server.lock import acquire
from server.starting import OwnSlot, StartError
from server.workers import DATA_DIR, LOST_AFTER_SECONDS, WorkerReport, WorkerTable
from tests.postgres import PostgresServer
from tests.server.databases import Clock, JobDatabase, job_database, worker_report
from tests.server.running_server import free_port

SHARED = "file:///mnt/clips"


@pytest.fixture
def slot(tmp_path: Path) -> OwnSlot:
    """The slot of this process."""
    return OwnSlot("ours/0", acquire(tmp_path / "lock"))


@pytest.fixture
def made(postgres: PostgresServer, tmp_path: Path) -> Iterator[JobDatabase]:
    """An empty job database in PostgreSQL: SQLite has one host."""
    with job_database("postgres", tmp_path, lambda: postgres) as made:
        yield made


@pytest.fixture
def settings(made: JobDatabase) -> Settings:
    """Files stay in the data folder."""
    return made.settings


def other(files: str = DATA_DIR) -> WorkerReport:
    """A worker of another host."""
    return dataclasses.replace(worker_report("other/0"), files=files)


def names(database: Database) -> list[str]:
    """Who has a row."""
    return [worker.name for worker in WorkerTable(database).all()]


def test_a_second_host_without_a_store_is_refused(
    settings: Settings, database: Database, slot: OwnSlot
) -> None:
    WorkerTable(database).report(other())
    with pytest.raises(StartError, match=r"worker other/0 .* own data folder.*set REELWRIGHT_STORAGE_URL on"):
        join(settings, database, "tiny-wan", slot)
    assert names(database) == ["other/0"]


def test_a_host_without_a_store_beside_those_that_have_one_is_refused(
    settings: Settings, database: Database, slot: OwnSlot
) -> None:
    WorkerTable(database).report(other(SHARED))
    with pytest.raises(StartError, match=rf"without REELWRIGHT_STORAGE_URL .* puts its own at {SHARED}"):
        join(settings, database, "tiny-wan", slot)


def test_a_host_with_a_store_beside_one_without_is_refused(
    settings: Settings, database: Database, slot: OwnSlot, tmp_path: Path
) -> None:
    WorkerTable(database).report(other())
    with_store = settings.model_copy(update={"storage_url": f"file://{tmp_path}/store"})
    for ours in (slot, None):
        with pytest.raises(StartError, match="worker other/0"):
            join(with_store, database, "tiny-wan", ours)


def test_hosts_that_are_gone_are_in_nobodys_way(
    settings: Settings, database: Database, slot: OwnSlot, clock: Clock
) -> None:
    WorkerTable(database).report(dataclasses.replace(other(), name="stopped/0", state="stopped"))
    WorkerTable(database).report(other())
    clock.shift(LOST_AFTER_SECONDS + 1)
    join(settings, database, "tiny-wan", slot)
    join(settings, database, "tiny-wan", slot)  # it is not in its own way after a restart either
    assert {"ours/0"} <= {*names(database)}


def test_another_url_of_the_store_is_said(
    settings: Settings, database: Database, slot: OwnSlot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder may be mounted at different places."""
    WorkerTable(database).report(other(SHARED))
    join(settings.model_copy(update={"storage_url": f"file://{tmp_path}/store"}), database, "tiny-wan", slot)
    assert "other_storage_url" in capsys.readouterr().out


def test_a_store_that_is_away_keeps_nobody_from_starting(
    settings: Settings,
    database: Database,
    slot: OwnSlot,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.storage.opening.RETRIES", 0)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    join(settings.model_copy(update={"storage_url": "s3://clips/a"}), database, "tiny-wan", slot)
    assert "store_not_checked" in capsys.readouterr().out
