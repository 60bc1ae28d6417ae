"""The SQLite file: durability settings, transactions, schema versions, named statements."""

import re
import sqlite3
from pathlib import Path

import pytest

from server.database import SQL_FOLDER, Database, DatabaseVersionError, migrate, read_statements


def test_commits_are_durable_and_readers_do_not_wait(database: Database) -> None:
    with database.read() as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
        assert connection.execute("PRAGMA busy_timeout").fetchone()[0] == 10_000


def test_a_transaction_that_raises_leaves_nothing(database: Database) -> None:
    with pytest.raises(sqlite3.IntegrityError), database.write() as connection:
        connection.executemany("INSERT INTO samples VALUES ('m', '[]', ?)", [(1.0,), (2.0,)])
    with database.read() as connection:
        assert connection.execute("SELECT COUNT(*) FROM samples").fetchone()[0] == 0


def test_a_full_disk_is_said_and_the_connection_works_again(database: Database) -> None:
    with database.read() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    rows = [(f"{number:0500}",) for number in range(1000)]
    with pytest.raises(sqlite3.OperationalError, match="full"), database.write() as connection:
        connection.executemany("INSERT INTO samples VALUES ('m', ?, 1.0)", rows)
    with database.write() as connection:
        connection.execute("INSERT INTO samples VALUES ('m', '[]', 1.0)")
    with database.read() as connection:
        assert connection.execute("SELECT COUNT(*) FROM samples").fetchone()[0] == 1


def test_a_commit_that_fails_leaves_no_open_transaction(database: Database) -> None:
    with database.write() as connection:
        connection.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)")
        connection.execute("CREATE TABLE children (parent REFERENCES parents DEFERRABLE INITIALLY DEFERRED)")
    with database.read() as connection:
        connection.execute("PRAGMA foreign_keys = ON")
    with pytest.raises(sqlite3.IntegrityError), database.write() as connection:
        connection.execute("INSERT INTO children VALUES (1)")  # found out by COMMIT
    with database.write() as connection:
        assert connection.execute("SELECT COUNT(*) FROM children").fetchone()[0] == 0


def test_a_reader_sees_the_state_before_an_open_transaction(database: Database) -> None:
    with database.write() as writer, database.read() as reader:
        writer.execute("INSERT INTO samples VALUES ('m', '[]', 1.0)")
        assert reader.execute("SELECT COUNT(*) FROM samples").fetchone()[0] == 0
    with database.read() as reader:
        assert reader.execute("SELECT COUNT(*) FROM samples").fetchone()[0] == 1


def test_migrating_twice_keeps_the_rows(database: Database) -> None:
    with database.write() as connection:
        connection.execute("INSERT INTO samples VALUES ('m', '[]', 1.0)")
    migrate(database.path)
    with database.read() as connection:
        assert connection.execute("SELECT value FROM samples").fetchone()[0] == 1.0


def test_a_newer_file_is_refused(database: Database) -> None:
    with database.read() as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(DatabaseVersionError, match="schema version 99"):
        migrate(database.path)


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite3"
    path.write_text("not a database, but long enough to have a header" * 10)
    with pytest.raises(sqlite3.DatabaseError):
        migrate(path)


def test_a_damaged_file_is_an_error(database: Database) -> None:
    with database.write() as connection:
        connection.execute("INSERT INTO samples VALUES ('m', '[]', 1.0)")
    with database.read() as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = database.path.read_bytes()
    database.path.write_bytes(content[:4096] + bytes([0xA5]) * (len(content) - 4096))
    with pytest.raises(sqlite3.DatabaseError):
        migrate(database.path)


@pytest.mark.parametrize("file_name", ["jobs.sql", "workers.sql", "observations.sql", "webhooks.sql"])
def test_every_named_statement_compiles(file_name: str, database: Database) -> None:
    statements = read_statements(file_name)
    text = (SQL_FOLDER / file_name).read_text(encoding="utf-8")
    assert len(statements) == text.count("-- name:") > 0
    with database.read() as connection:
        for statement in statements.values():
            values = dict.fromkeys(re.findall(r":(\w+)", statement))
            connection.execute(f"EXPLAIN {statement}", values)
