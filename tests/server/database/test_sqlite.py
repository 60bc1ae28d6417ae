"""The SQLite file: durability settings, transactions that fail, damage."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.database import (
    Database,
    DatabaseError,
    DatabaseUnavailableError,
    DatabaseVersionError,
    SqliteDatabase,
)


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[SqliteDatabase]:
    """An empty job database."""
    database = SqliteDatabase(tmp_path / "jobs.sqlite3")
    database.migrate()
    yield database
    database.close()


def rows(database: SqliteDatabase) -> int:
    """How many samples there are."""
    with database.read() as connection:
        count: int = connection.raw.execute("SELECT COUNT(*) AS count FROM samples").fetchone()["count"]
    return count


def test_commits_are_durable_and_readers_do_not_wait(sqlite: SqliteDatabase) -> None:
    with sqlite.read() as connection:
        found = [
            next(iter(connection.raw.execute(f"PRAGMA {name}").fetchone().values()))
            for name in ("journal_mode", "synchronous", "busy_timeout")
        ]
    assert found == ["wal", 2, 10_000]  # 2 is FULL


def test_a_full_disk_is_said_and_the_connection_works_again(sqlite: SqliteDatabase) -> None:
    with sqlite.read() as connection:
        pages = connection.raw.execute("PRAGMA page_count").fetchone()["page_count"]
        connection.raw.execute(f"PRAGMA max_page_count = {pages + 2}")
    many = [(f"{number:0500}",) for number in range(1000)]
    with pytest.raises(DatabaseUnavailableError, match="full"), sqlite.write() as connection:
        connection.raw.executemany("INSERT INTO samples VALUES ('m', ?, 1.0)", many)
    with sqlite.write() as connection:
        connection.raw.execute("INSERT INTO samples VALUES ('m', '[]', 1.0)")
    assert rows(sqlite) == 1


def test_a_commit_that_fails_leaves_no_open_transaction(sqlite: SqliteDatabase) -> None:
    with sqlite.write() as connection:
        connection.raw.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
        connection.raw.execute(
            "CREATE TABLE children (parent REFERENCES parents DEFERRABLE INITIALLY DEFERRED)"
        )
    with sqlite.read() as connection:
        connection.raw.execute("PRAGMA foreign_keys = ON")
    with pytest.raises(DatabaseError), sqlite.write() as connection:
        connection.raw.execute("INSERT INTO children VALUES (1)")  # found out by COMMIT
    with sqlite.write() as connection:
        assert connection.raw.execute("SELECT * FROM children").fetchall() == []


def test_a_newer_file_is_refused(sqlite: SqliteDatabase) -> None:
    with sqlite.read() as connection:
        connection.raw.execute("PRAGMA user_version = 99")
    with pytest.raises(DatabaseVersionError, match="schema version 99"):
        sqlite.migrate()


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite3"
    path.write_text("not a database, but long enough to have a header" * 10)
    with pytest.raises(DatabaseError):
        SqliteDatabase(path).migrate()


def test_a_damaged_file_is_an_error(sqlite: SqliteDatabase) -> None:
    with sqlite.write() as connection:
        connection.raw.execute("INSERT INTO samples VALUES ('m', '[]', 1.0)")
    with sqlite.read() as connection:
        connection.raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = sqlite.path.read_bytes()
    sqlite.path.write_bytes(content[:4096] + bytes([0xA5]) * (len(content) - 4096))
    with pytest.raises(DatabaseError):
        sqlite.migrate()


def test_it_wakes_nobody(sqlite: SqliteDatabase) -> None:
    database: Database = sqlite
    assert database.listen() is None
