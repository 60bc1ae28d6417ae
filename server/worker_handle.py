"""The supervisor's hold on one worker process: start it, talk to it, see it die, kill it.

Knows: the process and its pipe. Does not know: jobs, or when to start another worker.
"""

import multiprocessing
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection

from server.protocol import WorkerCommand, WorkerMessage
from server.worker_process import WorkerStart, run_worker

STOP_GRACE_SECONDS = 5.0
_SPAWN = multiprocessing.get_context("spawn")


class WorkerHandle:
    """A started worker process."""

    def __init__(self, start: WorkerStart) -> None:
        self._pipe: Connection[WorkerCommand, WorkerMessage]
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=run_worker, args=(start, theirs), name="reelwright-worker")
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def sources(self) -> list["Connection[WorkerCommand, WorkerMessage] | int"]:
        """What becomes readable when the worker says something or dies."""
        return [self._pipe, self._process.sentinel]

    def send(self, command: WorkerCommand) -> None:
        """Send a command. One to a dead worker is dropped; its death is seen through ``sources``."""
        try:
            self._pipe.send(command)
        except OSError:
            return

    def messages(self) -> Iterator[WorkerMessage]:
        """What the worker has said since the last call, what it said just before its death included."""
        try:
            while self._pipe.poll():
                yield self._pipe.recv()
        except (EOFError, OSError):
            return

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def stop(self) -> None:
        """End the process: in order if it can do so soon, else by force."""
        self._pipe.close()
        self._process.join(STOP_GRACE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the process now, whatever it does, and wait for it."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def cause_of_death(self) -> str:
        """How a dead worker ended, for people."""
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"
