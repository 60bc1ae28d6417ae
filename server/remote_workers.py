"""What stands for the supervisor in an API process that has none: the workers are on other hosts.

Knows: that the database wakes them, and that somebody must keep house when none of them lives. Does not know:
where they are; their rows say how they are.
"""

import asyncio

from fastapi.concurrency import run_in_threadpool

from server import logs
from server.database import DatabaseError
from server.housekeeping import Housekeeping

LOOK_SECONDS = 1.0


class RemoteWorkers:
    """Has the part of SupervisorHandle that the API uses."""

    is_alive = False
    pid: int | None = None
    slot: str | None = None

    def __init__(self, housekeeping: Housekeeping) -> None:
        self.is_stopping = False
        self._housekeeping = housekeeping
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to keep house; needs a running event loop."""
        self._keeper = asyncio.create_task(self._keep_house())

    def wake(self) -> None:
        """Nothing to do: the transaction that changed the queue has notified every supervisor."""

    async def drain(self, seconds: float) -> None:
        """Nothing runs here."""
        self.stop_now()

    def stop_now(self) -> None:
        """Stop to keep house."""
        self.is_stopping = True

    async def _keep_house(self) -> None:
        while not self.is_stopping:
            try:
                await run_in_threadpool(self._housekeeping.run)
            except DatabaseError as error:
                logs.get_logger().error("database_error", message=str(error))
            await asyncio.sleep(LOOK_SECONDS)
