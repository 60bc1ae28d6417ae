"""The API's hold on the supervisor process: start it, wake it, restart it when it dies, drain it.

Knows: the process and its pipe. Does not know: what the supervisor does.
"""

import asyncio
import multiprocessing
import select
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import anyio

from server import logs
from server.backoff import Backoff
from server.protocol import ApiMessage, Drain, WakeUp
from server.supervisor import DATABASE_ERROR_EXIT, SupervisorStart, run_supervisor

_SPAWN = multiprocessing.get_context("spawn")
STOP_GRACE_SECONDS = 10.0
LONGEST_BACKOFF_SECONDS = 30.0


class SupervisorHandle:
    """One supervisor process at a time, for the life of the API process."""

    def __init__(self, start: SupervisorStart) -> None:
        self._start = start
        self._process: SpawnProcess | None = None
        self._pipe: Connection[ApiMessage, None] | None = None
        self._sending = threading.Lock()  # wake() is called from the threads of requests
        self._keeper: asyncio.Task[None] | None = None
        self.is_stopping = False

    @property
    def slot(self) -> str | None:
        """The name of its worker slot."""
        return self._start.slot

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.is_alive()

    @property
    def pid(self) -> int | None:
        """The process, or None before the first one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, and again whenever it dies, until it is drained or killed."""
        self._keeper = asyncio.create_task(self._keep_running())

    def wake(self) -> None:
        """Tell the supervisor to look at the job table. Never blocks: it looks every second by itself."""
        self._send(WakeUp())

    async def drain(self, seconds: float) -> None:
        """Have the running job finished or queued again, and the process gone, soon after ``seconds``."""
        self.is_stopping = True
        if self._keeper is not None and self._send(Drain(seconds)):
            await asyncio.wait({self._keeper}, timeout=seconds + STOP_GRACE_SECONDS)
        self.stop_now()

    def stop_now(self) -> None:
        """End the process: it finds its pipe closed, kills its worker and queues the running job again."""
        self.is_stopping = True
        if self._process is None:
            return
        self._close_pipe()
        self._process.join(STOP_GRACE_SECONDS)
        self._process.kill()
        self._process.join()

    async def _keep_running(self) -> None:
        log = logs.get_logger()
        backoff = Backoff(LONGEST_BACKOFF_SECONDS)
        while not self.is_stopping:
            started_at = time.monotonic()
            process = self._launch()
            await anyio.wait_readable(process.sentinel)
            process.join()
            self._start = replace(self._start, follows_database_error=process.exitcode == DATABASE_ERROR_EXIT)
            if time.monotonic() - started_at > LONGEST_BACKOFF_SECONDS:
                backoff.succeeded()
            if not self.is_stopping:
                seconds = backoff.failed()
                log.error("supervisor_died", exit_code=process.exitcode, retry_seconds=seconds)
                await asyncio.sleep(seconds)

    def _launch(self) -> SpawnProcess:
        self._close_pipe()
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(
            target=run_supervisor, args=(self._start, theirs), name="reelwright-supervisor"
        )
        self._process.start()
        theirs.close()
        return self._process

    def _close_pipe(self) -> None:
        with self._sending:
            if self._pipe is not None:
                self._pipe.close()

    def _send(self, message: ApiMessage) -> bool:
        with self._sending:
            if self._pipe is None or self._pipe.closed:
                return False
            poll = select.poll()
            poll.register(self._pipe, select.POLLOUT)
            if not poll.poll(0):
                return False  # nobody has read for long, and a full pipe holds enough wake-ups
            try:
                self._pipe.send(message)
            except OSError:
                return False
            return True
