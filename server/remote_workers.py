"""What stands for the supervisor in an API process that has none: the workers are on other hosts.

Knows: that the database wakes them, and that somebody must keep house when none of them lives. Does not know:
where they are; their rows say how they are.
"""

import asyncio
from collections import deque

from fastapi.concurrency import run_in_threadpool

from server.database import Database, DatabaseError
from server.housekeeping import Housekeeping
from server.outage import Outage
from server.storage.store import VideoStore

LOOK_SECONDS = 1.0


class Leftovers:
    """Jobs whose files are to be removed. One thread puts them in, another one may take them out."""

    def __init__(self) -> None:
        self._job_ids: deque[str] = deque()

    def remove(self, job_id: str) -> None:
        """Remember it."""
        self._job_ids.append(job_id)

    def next(self) -> str | None:
        """The one that has waited longest, which is then forgotten."""
        return self._job_ids.popleft() if self._job_ids else None


class RemoteWorkers:
    """Has the part of SupervisorHandle that the API uses."""

    is_alive = False
    pid: int | None = None
    slot: str | None = None

    def __init__(self, database: Database, store: VideoStore, retention_seconds: float | None) -> None:
        self.is_stopping = False
        self._leftovers = Leftovers()
        self._housekeeping = Housekeeping(database, self._leftovers, retention_seconds)
        self._store = store
        self._outage = Outage()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to keep house; needs a running event loop."""
        self._tasks = [asyncio.create_task(self._keep_house()), asyncio.create_task(self._remove_leftovers())]

    def wake(self) -> None:
        """Nothing to do: the transaction that changed the queue has notified every supervisor."""

    async def drain(self, seconds: float) -> None:
        """Nothing runs here."""
        self.stop_now()

    def stop_now(self) -> None:
        """Stop to keep house, in the middle of a removal: a sweep finds what is left."""
        self.is_stopping = True
        for task in self._tasks:
            task.cancel()

    async def _keep_house(self) -> None:
        while not self.is_stopping:
            try:
                await run_in_threadpool(self._housekeeping.run)
            except DatabaseError as error:
                self._outage.failed(error)
            else:
                self._outage.succeeded()
            await asyncio.sleep(LOOK_SECONDS)

    async def _remove_leftovers(self) -> None:
        """Beside the housekeeping: a store that hangs must not keep lost workers' jobs from running again."""
        while not self.is_stopping:
            while (job_id := self._leftovers.next()) is not None:
                await self._store.remove(job_id)
            await asyncio.sleep(LOOK_SECONDS)
