"""Jobs as event streams show them, looked up once per change for any number of streams.

Knows: when a look-up is out of date. Does not know: who watches, or the format of an event.
"""

from dataclasses import dataclass

from server.feed import ChangeFeed
from server.job import Job
from server.jobs import JobTable
from server.present import Presenter
from server.schemas import Video


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A row and what it shows as."""

    job: Job
    video: Video


class Snapshots:
    """Remembers what it found until the database changes."""

    def __init__(self, jobs: JobTable, presenter: Presenter, feed: ChangeFeed) -> None:
        self._jobs = jobs
        self._presenter = presenter
        self._feed = feed
        self._change = feed.next_change()
        self._found: dict[str, Snapshot | None] = {}

    def get(self, job_id: str) -> Snapshot | None:
        """The job, or None if there is none (any more). Whoever asks must have seen that it is theirs."""
        if self._change.is_set():
            self._change = self._feed.next_change()
            self._found.clear()
        if job_id not in self._found:
            job = self._jobs.find(job_id)
            self._found[job_id] = Snapshot(job, self._presenter.video(job)) if job else None
        return self._found[job_id]
