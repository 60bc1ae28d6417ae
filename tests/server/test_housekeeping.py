"""Who takes claims from lost workers, and when nobody may."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from server.claims import ClaimTable
from server.database import Database
from server.files import DataFolder
from server.housekeeping import REAP_SECONDS, Housekeeping
from server.jobs import JobTable
from server.workers import LOST_AFTER_SECONDS, WorkerTable
from tests.server.databases import Clock, worker_report
from tests.server.samples import new_job


class Time:
    """The monotonic clock of the housekeeping."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr("server.housekeeping.time", SimpleNamespace(monotonic=lambda: self.now))


def test_a_silent_worker_is_lost_but_not_right_after_an_outage(
    jobs: JobTable, database: Database, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Time(monkeypatch)
    housekeeping = Housekeeping(database, DataFolder(tmp_path), None)
    WorkerTable(database).report(worker_report("b/0"))
    job = jobs.submit(new_job()).job
    assert ClaimTable(database, worker="b/0").claim("tiny-wan") is not None

    def status_after(seconds: float) -> str:
        time.now += seconds
        housekeeping.run()
        found = jobs.find(job.id)
        assert found is not None
        return found.status

    for _ in range(10):
        assert status_after(REAP_SECONDS / 2) == "in_progress"
    clock.shift(LOST_AFTER_SECONDS + 1)  # the database was away for so long: nobody could write a heartbeat
    assert status_after(LOST_AFTER_SECONDS + 1) == "in_progress"
    for _ in range(int(2 * LOST_AFTER_SECONDS / REAP_SECONDS) - 1):
        assert status_after(REAP_SECONDS / 2) == "in_progress"
    ended = [status_after(REAP_SECONDS / 2) for _ in range(4)]
    # With SQLite there is one supervisor, and who looks after it is the API process.
    assert ended[-1] == ("queued" if database.is_remote else "in_progress")
