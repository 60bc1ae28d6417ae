"""The supervisor's row in the workers table, kept up to date.

Knows: the state of one worker slot in words. Does not know: how it got there.
"""

import time
from contextlib import suppress
from dataclasses import replace

from server.database import Database, DatabaseUnavailableError
from server.observations import MODEL_LOAD, observe
from server.protocol import ModelLoaded
from server.workers import (
    DATA_DIR,
    HEARTBEAT_SECONDS,
    LOCAL_SLOT,
    WorkerReport,
    WorkerState,
    WorkerTable,
    starting_report,
)


class WorkerReporter:
    """Writes a changed state at once, and a heartbeat when nothing changes."""

    def __init__(
        self,
        database: Database,
        model: str,
        slot: str = LOCAL_SLOT,
        gpus: int = 1,
        files: str = DATA_DIR,
    ) -> None:
        self._database = database
        self._table = WorkerTable(database)
        self._beat_at = 0.0
        self._unobserved: list[float] = []
        self._report = starting_report(slot, model, gpus, files)

    @property
    def state(self) -> WorkerState:
        """The state last reported."""
        return self._report.state

    def beat(self) -> None:
        """Give a sign of life, if the last one is old enough or could not be given.

        The memory in use goes with it. Raises DatabaseError.
        """
        if time.monotonic() < self._beat_at:
            return
        for seconds in list(self._unobserved):
            with self._database.write() as connection:
                observe(connection, MODEL_LOAD, seconds, self._report.model)
            self._unobserved.remove(seconds)
        self._table.report(self._report)
        self._beat_at = time.monotonic() + HEARTBEAT_SECONDS

    def uses(self, memory_in_use_bytes: dict[str, int] | None) -> None:
        """The worker lives; what it uses on each device is written with the next sign of life."""
        self._report = replace(self._report, memory_in_use_bytes=memory_in_use_bytes)

    def started(self, worker_pid: int | None) -> None:
        """A worker process was started. What went wrong before stays said until it is ready."""
        self._say(replace(self._report, worker_pid=worker_pid))

    def loaded(self, message: ModelLoaded) -> None:
        """The worker takes jobs."""
        self._unobserved.append(message.seconds)
        self._say(
            replace(
                self._report,
                state="ready",
                message="",
                device=message.device,
                dtype=message.dtype,
                load_seconds=message.seconds,
                memory_total_bytes=message.memory_total_bytes,
            )
        )

    def load_failed(self, message: str) -> None:
        """The model cannot be loaded."""
        self._say(replace(self._report, state="load_failed", message=message))

    def died(self, cause: str) -> None:
        """The worker process is gone; another one will be started."""
        self._say(
            replace(
                self._report,
                state="restarting",
                message=f"worker process {cause}",
                worker_pid=None,
                memory_in_use_bytes=None,
            )
        )

    def stopped(self) -> None:
        """The supervisor ends."""
        self._report = replace(self._report, state="stopped", message="stopped", worker_pid=None)
        self._beat_at = 0.0
        self.beat()

    def _say(self, report: WorkerReport) -> None:
        self._report = report
        self._beat_at = 0.0
        with suppress(DatabaseUnavailableError):  # the next beat writes it, or raises
            self.beat()
