"""Tells event streams that the job database changed.

Knows: how often to ask the database for news. Does not know: what changed; the streams look for themselves.
"""

import asyncio
from contextlib import closing, suppress

from server.database import Database, DatabaseError
from server.looking import look

POLL_SECONDS = 0.1
AWAY_SECONDS = 1.0  # between two tries to watch a database that does not answer


class ChangeFeed:
    """One task looks for changes on behalf of every stream."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._next_change = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_closed = False

    def start(self) -> None:
        """Begin to look; needs a running event loop."""
        self._task = asyncio.create_task(self._poll())

    def next_change(self) -> asyncio.Event:
        """Set at the first change from now on. Ask before reading, wait after: then none is missed."""
        return self._next_change

    def close(self) -> None:
        """Have every stream end."""
        self.is_closed = True
        if self._task is not None:
            self._task.cancel()
        self._announce()

    def _announce(self) -> None:
        self._next_change.set()
        self._next_change = asyncio.Event()

    async def _poll(self) -> None:
        while True:
            with suppress(DatabaseError):
                await self._announce_changes()
            self._announce()  # while the database does not answer, streams ask it themselves
            await asyncio.sleep(AWAY_SECONDS)

    async def _announce_changes(self) -> None:
        with closing(await look(self._database, self._database.watch)) as watch:
            self._announce()
            while True:
                if watch.has_changed():
                    self._announce()
                await asyncio.sleep(POLL_SECONDS)
