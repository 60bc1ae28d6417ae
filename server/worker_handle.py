"""The supervisor's hold on one worker process: start it, talk to it, see it die, kill it.

Knows: the process and its pipe. Does not know: jobs, or when to start another worker.
"""

import multiprocessing
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue

from server.protocol import WorkerCommand, WorkerMessage
from server.silence import Silence
from server.worker_process import WorkerStart, run_worker

STOP_GRACE_SECONDS = 5.0
# A worker that stops in the middle of a message must not stop its reader too.
WHOLE_MESSAGE_SECONDS = 10
_SPAWN = multiprocessing.get_context("spawn")


class WorkerHandle:
    """A started worker process."""

    def __init__(self, start: WorkerStart) -> None:
        self._pipe: Connection[WorkerCommand, WorkerMessage]
        self._pipe, theirs = _SPAWN.Pipe()
        _limit_receiving(self._pipe)
        self._process = _SPAWN.Process(target=run_worker, args=(start, theirs), name="reelwright-worker")
        self._process.start()
        theirs.close()
        self._silence = Silence()
        self._commands: SimpleQueue[WorkerCommand | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="worker-commands", daemon=True)
        self._sender.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def sources(self) -> list["Connection[WorkerCommand, WorkerMessage] | int"]:
        """What becomes readable when the worker says something or dies."""
        return [self._pipe, self._process.sentinel]

    def send(self, command: WorkerCommand) -> None:
        """Send a command, without waiting for a worker that does not read.

        One to a dead worker is dropped; its death is seen through ``sources``.
        """
        self._commands.put(command)

    def messages(self) -> Iterator[WorkerMessage]:
        """What the worker has said since the last call, what it said just before its death included."""
        try:
            while self._pipe.poll():
                message = self._pipe.recv()
                self._silence.broken()
                yield message
        except BlockingIOError:
            self._process.kill()
        except (EOFError, OSError):
            return

    def silent_seconds(self) -> float:
        """Since the last message. To be asked after ``messages``, and often: see Silence."""
        return self._silence.look()

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def stop(self) -> None:
        """End the process: in order if it can do so soon, else by force."""
        self._commands.put(None)
        self._sender.join(STOP_GRACE_SECONDS)
        if not self._sender.is_alive():
            self._pipe.close()
            self._process.join(STOP_GRACE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the process now, whatever it does, and wait for it."""
        self._process.kill()
        self._process.join()
        self._commands.put(None)
        self._sender.join()  # a send to the dead process fails at once
        self._pipe.close()

    def cause_of_death(self) -> str:
        """How a dead worker ended, for people."""
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def _send_all(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                self._pipe.send(command)
            except OSError:
                return


def _limit_receiving(pipe: "Connection[WorkerCommand, WorkerMessage]") -> None:
    with socket.socket(fileno=os.dup(pipe.fileno())) as connection:
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", WHOLE_MESSAGE_SECONDS, 0)
        )
