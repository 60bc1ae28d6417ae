"""PostgreSQL alone: migrations, the queue row of each job, notifications, a server that dies."""

import multiprocessing
import select
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from pydantic import SecretStr

from configs.settings import Settings
from server.claims import Claim, ClaimTable
from server.database import (
    Database,
    DatabaseError,
    DatabaseUnavailableError,
    DatabaseVersionError,
    Listener,
    open_database,
)
from server.database.procrastinate_queue import LONGEST_QUEUE_NAME_BYTES, queue_name
from server.jobs import JobTable
from server.workers import WorkerTable
from tests.postgres import PostgresServer
from tests.server.databases import JobDatabase, disagreements, job_database, worker_report
from tests.server.samples import new_job, result
from tests.server.test_jobs import claim_of

WAIT_SECONDS = 60.0


@pytest.fixture
def made(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobDatabase]:
    """An empty job database in PostgreSQL."""
    with job_database("postgres", tmp_path_factory.mktemp("data"), lambda: postgres) as made:
        yield made


@pytest.fixture
def listener(database: Database) -> Iterator[Listener]:
    """What wakes a supervisor."""
    listener = database.listen()
    assert listener is not None
    yield listener
    listener.close()


def ask(made: JobDatabase, statement: str) -> list[tuple[object, ...]]:
    """The rows of a statement of the test's own."""
    assert made.url is not None
    with psycopg.connect(made.url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def migrate(url: str) -> None:
    """In a process of its own: bring the tables up to date."""
    database = open_database(Settings(database_url=SecretStr(url)))
    database.migrate()
    database.close()


def test_processes_that_start_at_once_migrate_once(postgres: PostgresServer) -> None:
    url = postgres.create_empty()
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=migrate, args=(url,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT version FROM reelwright_schema").fetchall() == [(1,), (2,)]


def test_threads_that_start_at_once_migrate_once(postgres: PostgresServer) -> None:
    url = postgres.create_empty()
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(migrate, [url] * 8)) == [None] * 8


def test_a_newer_schema_is_refused(database: Database, made: JobDatabase) -> None:
    ask(made, "INSERT INTO reelwright_schema VALUES (99, '9.9.9')")
    try:
        with pytest.raises(DatabaseVersionError, match="schema version 99"):
            database.migrate()
    finally:
        ask(made, "DELETE FROM reelwright_schema WHERE version = 99")


def test_tables_that_are_missing_are_not_a_server_that_is_away(postgres: PostgresServer) -> None:
    database = open_database(Settings(database_url=SecretStr(postgres.create_empty())))
    with pytest.raises(DatabaseError) as caught:
        JobTable(database).running()
    assert not isinstance(caught.value, DatabaseUnavailableError)
    database.close()


def submit_and_fail(database: Database) -> None:
    """A transaction that writes both rows of a job and is undone."""
    with database.write() as connection:
        connection.queue.put("video_x", "tiny-wan", 0, None)


def test_a_rollback_leaves_neither_row(database: Database, made: JobDatabase) -> None:
    with pytest.raises(DatabaseError):
        submit_and_fail(database)  # there is no such job, and the row that ties both says so
    assert ask(made, "SELECT * FROM procrastinate_jobs") == []


ENDS: list[Callable[[JobTable, ClaimTable, Claim], object]] = [
    lambda jobs, claims, claim: claims.complete(claim, result()),
    lambda jobs, claims, claim: claims.requeue(claim),
    lambda jobs, claims, claim: jobs.cancel(claim.job_id),
    lambda jobs, claims, claim: jobs.delete(claim.job_id),
]


@pytest.mark.parametrize("end", ENDS)
def test_the_queue_row_follows_the_job(
    end: Callable[[JobTable, ClaimTable, Claim], object],
    jobs: JobTable,
    claims: ClaimTable,
    database: Database,
    made: JobDatabase,
) -> None:
    jobs.submit(new_job(priority=3))
    row = "SELECT queue_name, priority, task_name, status, worker_id IS NOT NULL FROM procrastinate_jobs"
    assert ask(made, row) == [("tiny-wan@1", 3, "reelwright.run", "todo", False)]
    claim = claim_of(claims.claim("tiny-wan"))
    assert ask(made, row) == [("tiny-wan@1", 3, "reelwright.run", "doing", True)]
    end(jobs, claims, claim)
    assert disagreements(database) == []


def test_a_long_model_name_fits_procrastinates_channel(jobs: JobTable, claims: ClaimTable) -> None:
    model = "an-owner-with-a-long-name/a-model-with-a-long-name-" + "x" * 100
    assert len(queue_name(model, 1).encode()) <= LONGEST_QUEUE_NAME_BYTES
    assert queue_name(model, 1) != queue_name(model + "y", 1)
    assert queue_name(model, 1) != queue_name(model, 2)
    job_id = jobs.submit(new_job(model)).job.id
    assert claim_of(claims.claim(model)).job_id == job_id


def test_a_job_is_for_workers_with_as_many_gpus(
    jobs: JobTable, claims: ClaimTable, made: JobDatabase
) -> None:
    of_two = open_database(made.settings.model_copy(update={"gpus": 2}))
    job_id = JobTable(of_two).submit(new_job()).job.id
    assert claims.claim("tiny-wan") is None
    assert claim_of(ClaimTable(of_two, worker="two").claim("tiny-wan")).job_id == job_id
    of_two.close()


def test_a_queue_that_was_tampered_with_is_put_right(
    jobs: JobTable, claims: ClaimTable, database: Database, made: JobDatabase
) -> None:
    ids = [jobs.submit(new_job()).job.id for _ in range(3)]
    jobs.cancel(jobs.submit(new_job()).job.id)
    ask(made, "DELETE FROM procrastinate_jobs WHERE args ->> 'job_id' = (SELECT MIN(id) FROM jobs)")
    ask(made, f"UPDATE jobs SET status = 'failed' WHERE id = '{ids[1]}'")
    claims.reap()
    claimed = [claim_of(claims.claim("tiny-wan")).job_id for _ in range(2)]
    assert sorted(claimed) == [ids[0], ids[2]]
    assert claims.claim("tiny-wan") is None
    assert disagreements(database) == []


@pytest.mark.parametrize("change", ["submit", "cancel queued", "cancel running", "delete", "requeue"])
def test_what_a_supervisor_should_see_wakes_it(
    change: str, jobs: JobTable, claims: ClaimTable, listener: Listener
) -> None:
    if change != "submit":
        job_id = jobs.submit(new_job()).job.id
    if change in {"cancel running", "requeue"}:
        claim = claim_of(claims.claim("tiny-wan"))
    while listener.has_changed():
        pass
    assert not listener.has_changed()
    match change:
        case "submit":
            jobs.submit(new_job())
        case "requeue":
            claims.requeue(claim)
        case "delete":
            jobs.delete(job_id)
        case _:
            jobs.cancel(job_id)
    ready, _, _ = select.select([listener], [], [], WAIT_SECONDS)
    assert ready == [listener]
    assert listener.has_changed()
    assert not listener.has_changed()


def test_a_step_wakes_no_supervisor(jobs: JobTable, claims: ClaimTable, listener: Listener) -> None:
    jobs.submit(new_job())
    claim = claim_of(claims.claim("tiny-wan"))
    listener.has_changed()
    claims.finish_step(claim, 1, 0.5, 10)
    jobs.submit(new_job("other-model"))
    select.select([listener], [], [], WAIT_SECONDS)
    assert listener.has_changed()
    assert not listener.has_changed()


def test_the_heartbeat_is_procrastinates_too(database: Database, made: JobDatabase) -> None:
    workers = WorkerTable(database)
    workers.report(worker_report("a/0"))
    (first,) = ask(made, "SELECT id, last_heartbeat FROM procrastinate_workers")
    workers.report(worker_report("a/0"))
    (second,) = ask(made, "SELECT id, last_heartbeat FROM procrastinate_workers")
    assert (first[0], first[1] != second[1]) == (second[0], True)


@pytest.mark.alone
def test_a_server_that_dies_and_comes_back_loses_no_commit(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("data")
    with PostgresServer() as server, job_database("postgres", folder, lambda: server) as made:
        jobs, watch = JobTable(made.database), made.database.watch()
        job = jobs.submit(new_job()).job
        server.kill()
        with pytest.raises(DatabaseUnavailableError):
            jobs.get(job.id)
        with pytest.raises(DatabaseUnavailableError):
            [watch.has_changed() for _ in range(3)]  # what had arrived before comes first
        watch.close()
        server.start()
        assert jobs.get(job.id) == job
        assert jobs.submit(new_job()).is_new
