"""Jobs as event streams show them, looked up once per change for any number of streams.

Knows: when a look-up is out of date. Does not know: who watches, or the format of an event.
"""

import asyncio
import time
from dataclasses import dataclass

from server.database import Database
from server.feed import ChangeFeed
from server.job import Job
from server.jobs import JobTable
from server.looking import look
from server.present import Presenter
from server.schemas import Video

FRESH_SECONDS = 4.0  # less than streams wait before they look again


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A row and what it shows as."""

    job: Job
    video: Video


class Snapshots:
    """Remembers what it found until the database changes, and for ``FRESH_SECONDS`` at most.

    A worker that falls silent changes nothing there, and yet what is shown of the jobs that wait for it.
    """

    def __init__(self, database: Database, jobs: JobTable, presenter: Presenter, feed: ChangeFeed) -> None:
        self._database = database
        self._jobs = jobs
        self._presenter = presenter
        self._feed = feed
        self._change = feed.next_change()
        self._found: dict[str, Snapshot | None] = {}
        self._fresh_until = 0.0
        self._looking = asyncio.Lock()

    async def get(self, job_id: str) -> Snapshot | None:
        """The job, or None if there is none (any more). Whoever asks must have seen that it is theirs.

        Raises DatabaseError.
        """
        async with self._looking:  # one look-up serves all who wait for it
            if self._change.is_set() or time.monotonic() >= self._fresh_until:
                self._change = self._feed.next_change()
                self._found.clear()
                self._fresh_until = time.monotonic() + FRESH_SECONDS
            if job_id not in self._found:
                self._found[job_id] = await look(self._database, self._look_up, job_id)
            return self._found[job_id]

    def _look_up(self, job_id: str) -> Snapshot | None:
        job = self._jobs.find(job_id)
        return Snapshot(job, self._presenter.video(job)) if job else None
