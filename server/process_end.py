"""The end of a process that used an object store: all of Python's end except its finalization.

Knows: what Python does when a process ends, and in which order. Does not know: what the process was.

obstore's threads belong to no Python thread and are not waited for. One that handed over the last answer and
then wants Python's lock back from an interpreter that is being finalized is ended by ``pthread_exit`` in the
middle of Rust's frames, which aborts the process: SIGABRT instead of its exit code (before Python 3.14, which
leaves such threads hanging).
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

# What Python itself exits with when the last of the output cannot be written.
_FLUSH_FAILED = 120


def run_to_end(process: Callable[[], None]) -> NoReturn:
    """Be ``process``, then end: 0, 1 after an error that nobody handled, or what SystemExit says."""
    status = _status_of(process)
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
        atexit._run_exitfuncs()
        status = _flush() or status
    finally:
        os._exit(status)


def _status_of(process: Callable[[], None]) -> int:
    try:
        process()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _flush() -> int:
    status = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            status = _FLUSH_FAILED
    return status
