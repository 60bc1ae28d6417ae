"""A thread with an event loop, for what takes time beside a supervisor's own loop.

Knows: tasks, by the attempt they serve, and how to stop them. Does not know: what they do.
"""

import asyncio
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from server import logs
from server.claims import Claim
from server.storage.job_files import StorageMessage

CLOSE_SECONDS = 5.0

Errand = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""Gets the flag that tells it to stop."""


class Errands:
    """Any thread may give errands; ``messages`` and ``close`` are the owner's."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: defaultdict[str, set[asyncio.Task[None]]] = defaultdict(set)
        self._stops: dict[Claim, asyncio.Event] = {}
        self._said: SimpleQueue[StorageMessage] = SimpleQueue()
        self._reading_end, self._writing_end = os.pipe()
        os.set_blocking(self._reading_end, False)
        os.set_blocking(self._writing_end, False)
        self._thread = threading.Thread(target=self._run, name="storage", daemon=True)
        self._thread.start()

    def run(self, claim: Claim, errand: Errand) -> None:
        """Start something for an attempt."""
        self._call(self._start, claim, errand)

    def run_after(self, job_id: str, errand: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start something when all that was started before for any attempt at a job has ended."""
        self._call(self._start_after, job_id, errand)

    def stop(self, claim: Claim) -> None:
        """Tell an attempt's errands to stop."""
        self._call(self._stop, claim)

    def say(self, message: StorageMessage) -> None:
        """Leave a message for the owner, and wake it."""
        self._said.put(message)
        with suppress(BlockingIOError):  # so many wait that the pipe is full: it is awake
            os.write(self._writing_end, b"\0")

    def sources(self) -> list[int]:
        """What becomes readable when there are messages."""
        return [self._reading_end]

    def messages(self) -> list[StorageMessage]:
        """All messages since the last call."""
        with suppress(BlockingIOError):
            os.read(self._reading_end, 65536)
        found = []
        with suppress(Empty):
            while True:
                found.append(self._said.get_nowait())
        return found

    def close(self) -> None:
        """End everything, in the middle of whatever it does. To be called once."""
        self._call(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        os.close(self._reading_end)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()
        os.close(self._writing_end)

    def _start(self, claim: Claim, errand: Errand) -> None:
        stop = self._stops.setdefault(claim, asyncio.Event())
        self._keep(claim.job_id, self._loop.create_task(errand(stop)))

    def _start_after(self, job_id: str, errand: Callable[[], Coroutine[Any, Any, None]]) -> None:
        before = list(self._tasks[job_id])

        async def wait_and_run() -> None:
            if before:
                await asyncio.wait(before)
            await errand()

        self._keep(job_id, self._loop.create_task(wait_and_run()))

    def _stop(self, claim: Claim) -> None:
        if stop := self._stops.get(claim):
            stop.set()

    def _keep(self, job_id: str, task: asyncio.Task[None]) -> None:
        self._tasks[job_id].add(task)
        task.add_done_callback(lambda ended: self._forget(job_id, ended))

    def _forget(self, job_id: str, task: asyncio.Task[None]) -> None:
        self._tasks[job_id].discard(task)
        if not self._tasks[job_id]:
            del self._tasks[job_id]
            for claim in [claim for claim in self._stops if claim.job_id == job_id]:
                del self._stops[claim]
        if not task.cancelled() and (error := task.exception()) is not None:
            logs.get_logger().error("storage_errand_failed", job=job_id, exc_info=error)


class NewestOnly:
    """Sends one thing of a kind at a time; of those that come meanwhile, only the last."""

    def __init__(self) -> None:
        self._waiting: dict[Claim, Callable[[], Coroutine[Any, Any, None]]] = {}
        self._busy: set[Claim] = set()

    async def send(self, claim: Claim, sending: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``sending`` now or soon, unless a newer one comes before its turn."""
        self._waiting[claim] = sending
        if claim in self._busy:
            return
        self._busy.add(claim)
        try:
            while newest := self._waiting.pop(claim, None):
                await newest()
        finally:
            self._busy.discard(claim)
