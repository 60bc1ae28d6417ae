"""What a supervisor reports, and when it counts as lost."""

import dataclasses
import time

import pytest

from server.database import Database
from server.observations import MODEL_LOAD, read_samples
from server.protocol import ModelLoaded
from server.worker_reporter import WorkerReporter
from server.workers import HEARTBEAT_SECONDS, LOST_AFTER_SECONDS, Worker, WorkerTable

LOADED = ModelLoaded(seconds=2.0, device="cpu", dtype="float32", memory_total_bytes=64_000)


@pytest.fixture
def reporter(database: Database) -> WorkerReporter:
    """A supervisor that has just started a worker."""
    reporter = WorkerReporter(database, "tiny-wan")
    reporter.started(123)
    return reporter


def only(database: Database) -> Worker:
    """The one row."""
    (worker,) = WorkerTable(database).all()
    return worker


def test_a_worker_is_ready_when_its_model_is_loaded(database: Database, reporter: WorkerReporter) -> None:
    assert (only(database).state, only(database).worker_pid, only(database).is_ready) == (
        "loading",
        123,
        False,
    )
    reporter.loaded(LOADED)
    worker = only(database)
    assert worker.is_ready
    assert (worker.device, worker.dtype, worker.load_seconds) == ("cpu", "float32", 2.0)
    assert read_samples(database, MODEL_LOAD) == {("tiny-wan",): 2.0}


def test_memory_in_use_is_written_with_the_heartbeat(
    database: Database, reporter: WorkerReporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter.loaded(LOADED)
    reporter.uses({"cpu": 5_000})
    assert (only(database).memory_total_bytes, only(database).memory_in_use_bytes) == (64_000, None)
    later = time.monotonic() + HEARTBEAT_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: later)
    before = only(database).heartbeat_at
    reporter.beat()
    assert only(database).memory_in_use_bytes == {"cpu": 5_000}
    assert only(database).heartbeat_at > before
    reporter.died("killed by SIGKILL")
    assert only(database).memory_in_use_bytes is None


def test_why_it_is_not_ready_stays_said_until_it_is(database: Database, reporter: WorkerReporter) -> None:
    reporter.load_failed("no such folder")
    reporter.started(456)
    worker = only(database)
    assert (worker.state, worker.message, worker.worker_pid) == ("load_failed", "no such folder", 456)
    reporter.loaded(LOADED)
    assert only(database).message == ""
    reporter.died("killed by SIGKILL")
    assert (only(database).state, only(database).worker_pid) == ("restarting", None)
    assert "SIGKILL" in only(database).message


def test_a_supervisor_without_heartbeat_is_lost(database: Database, reporter: WorkerReporter) -> None:
    reporter.loaded(LOADED)
    silent = dataclasses.replace(only(database), heartbeat_age_seconds=LOST_AFTER_SECONDS + 1)
    assert not silent.is_alive
    assert not silent.is_ready


def test_a_new_server_forgets_the_old_ones_workers(database: Database, reporter: WorkerReporter) -> None:
    assert reporter.state == "loading"
    WorkerTable(database).forget_all()
    assert WorkerTable(database).all() == []
