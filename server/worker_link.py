"""The worker's end of the pipe to its supervisor.

Knows: the messages, and the end of the supervisor. Does not know: torch, or how a job is run.
A thread reads commands, so that a cancel is known in the middle of a step; another gives signs of life.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from configs.job import JobParameters
from server.claims import Claim
from server.protocol import (
    ALIVE_SECONDS,
    Alive,
    CancelJob,
    EncodeAhead,
    RunJob,
    WorkerCommand,
    WorkerMessage,
)

# For jobs to stop and their memory to be freed in order, once the supervisor is gone.
EXIT_GRACE_SECONDS = 4.0


class SupervisorLink:
    """Commands come in, messages go out; any thread may send."""

    def __init__(self, pipe: "Connection[WorkerMessage, WorkerCommand]") -> None:
        self._pipe = pipe
        self._sending = threading.Lock()
        self._jobs: queue.Queue[RunJob | None] = queue.Queue()
        self._ahead: queue.Queue[JobParameters] = queue.Queue()
        self._cancels: dict[Claim, threading.Event] = {}
        self._is_cut = threading.Event()
        self._memory_in_use: Callable[[], dict[str, int]] | None = None

    def start(self) -> None:
        """Start reading, and giving signs of life, in threads that do not keep the process alive.

        Before the model is loaded: that takes minutes, and Python's lock is held only for parts of them.
        """
        for work in (self._read, self._beat):
            threading.Thread(target=work, name=f"supervisor-link{work.__name__}", daemon=True).start()

    def report_memory(self, memory_in_use: Callable[[], dict[str, int]]) -> None:
        """Add the bytes in use, by device, to every sign of life from now on."""
        self._memory_in_use = memory_in_use

    def send(self, message: WorkerMessage) -> None:
        """Tell the supervisor; when it is gone nobody needs to know."""
        with self._sending, suppress(OSError):
            self._pipe.send(message)

    def next_job(self) -> RunJob | None:
        """Wait for a job; None when there will be none."""
        return self._jobs.get()

    def no_more_jobs(self) -> None:
        """Have ``next_job`` return None."""
        self._jobs.put(None)

    def next_ahead(self) -> JobParameters:
        """Wait for a job that may come next. Of those not yet taken only the newest matters."""
        newest = self._ahead.get()
        with suppress(queue.Empty):
            while True:
                newest = self._ahead.get_nowait()
        return newest

    def is_cancelled(self, claim: Claim) -> bool:
        """Whether this attempt is to stop, by request or because the supervisor is gone."""
        return self._is_cut.is_set() or self._cancels[claim].is_set()

    def ended(self, claim: Claim) -> None:
        """The attempt is over; a cancel that comes late finds nothing."""
        del self._cancels[claim]

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._take(self._pipe.recv())
        self._is_cut.set()
        self._jobs.put(None)
        time.sleep(EXIT_GRACE_SECONDS)
        os._exit(1)

    def _take(self, command: WorkerCommand) -> None:
        match command:
            case RunJob(claim):
                self._cancels[claim] = threading.Event()
                self._jobs.put(command)
            case CancelJob(claim):
                if cancel := self._cancels.get(claim):
                    cancel.set()
            case EncodeAhead(parameters):
                self._ahead.put(parameters)

    def _beat(self) -> None:
        while not self._is_cut.wait(ALIVE_SECONDS):
            self.send(Alive(self._memory_in_use() if self._memory_in_use else None))
