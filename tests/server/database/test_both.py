"""What every engine promises: transactions, statements, the clock, watching."""

import re
import time

import pytest

from server.database import Database, DatabaseError, Statement, read_statements
from server.database.statements import SQL_FOLDER, in_postgres
from server.jobs import JobTable
from server.observations import JOBS_TOTAL, count, read_samples
from tests.server.databases import Clock, JobDatabase
from tests.server.samples import new_job

FILES = ("jobs.sql", "workers.sql", "observations.sql", "webhooks.sql")
SECONDS = {"now": 1.0, "lease_seconds": 1.0, "delay_seconds": 1.0}
WRONG = Statement(*["INSERT INTO samples (metric, labels, value) VALUES ('m', '[]', NULL)"] * 2)


def count_and_fail(database: Database, wrong: Statement | None) -> None:
    """A transaction whose second half fails: in the database, or in Python."""
    with database.write() as connection:
        count(connection, JOBS_TOTAL, "a", "completed")
        if wrong is None:
            raise KeyError
        connection.run(wrong)


@pytest.mark.parametrize(("wrong", "error"), [(WRONG, DatabaseError), (None, KeyError)])
def test_a_transaction_that_raises_leaves_nothing(
    wrong: Statement | None, error: type[Exception], database: Database
) -> None:
    with pytest.raises(error):
        count_and_fail(database, wrong)
    assert read_samples(database, JOBS_TOTAL) == {}
    with database.write() as connection:
        count(connection, JOBS_TOTAL, "a", "completed")
    assert read_samples(database, JOBS_TOTAL) == {("a", "completed"): 1.0}


def test_a_reader_sees_the_state_before_an_open_transaction(database: Database) -> None:
    with database.write() as writer:
        count(writer, JOBS_TOTAL, "a", "completed")
        assert read_samples(database, JOBS_TOTAL) == {}
    assert read_samples(database, JOBS_TOTAL) == {("a", "completed"): 1.0}


def test_migrating_twice_keeps_the_rows(database: Database, jobs: JobTable) -> None:
    job = jobs.submit(new_job()).job
    database.migrate()
    assert jobs.get(job.id) == job


@pytest.mark.parametrize("file_name", FILES)
def test_every_named_statement_compiles(file_name: str, database: Database, made: JobDatabase) -> None:
    statements = read_statements(file_name)
    text = (SQL_FOLDER / file_name).read_text(encoding="utf-8")
    names = re.findall(r"^-- name: (\w+)", text, re.MULTILINE)
    assert list(statements) == list(dict.fromkeys(names)) != []
    parameters = set(re.findall(r"(?<![:\w]):(\w+)", text))
    with database.read() as connection:
        for statement in statements.values():
            explained = Statement(f"EXPLAIN {statement.sqlite}", f"EXPLAIN {statement.postgres}")
            connection.all(explained, dict.fromkeys(parameters) | SECONDS)


def test_only_parameters_are_translated() -> None:
    assert in_postgres("SELECT '://', 5 % 2, x::text WHERE a = :a") == (
        "SELECT '://', 5 %% 2, x::text WHERE a = %(a)s"
    )
    assert in_postgres("owner IS :owner AND b IS NULL") == (
        "(owner = %(owner)s OR (owner IS NULL AND CAST(%(owner)s AS TEXT) IS NULL)) AND b IS NULL"
    )


def test_the_clock_is_about_right_and_stands_still_in_a_transaction(database: Database) -> None:
    with database.write() as connection:
        now = connection.now()
        assert abs(now - time.time()) < 60
    with database.read() as connection:
        assert connection.now() >= now


def test_the_clock_can_be_set_by_tests(database: Database, clock: Clock) -> None:
    clock.stop_at(1e9)
    with database.read() as connection:
        assert connection.now() == 1e9


def test_a_watch_tells_of_others_changes_once(database: Database, jobs: JobTable) -> None:
    watch = database.watch()
    try:
        assert not watch.has_changed()
        jobs.submit(new_job())
        give_up_at = time.monotonic() + 60
        while not watch.has_changed():
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        assert not watch.has_changed()
    finally:
        watch.close()
