"""``reelwright``, whose store's threads want Python's lock back while Python is finalized, and get none.

A thread of the store that has handed over an answer stops there, as it may on a busy machine, until objects
of modules are removed. A process that does not go so far ends before that.

python -m tests.server.held_threads serve --storage-url file:///...
"""

import asyncio
import threading
import time
from typing import Any

from server.cli import main

_call_soon_threadsafe = asyncio.BaseEventLoop.call_soon_threadsafe
_is_finalized = threading.Event()


class _Finalized:
    """Removed with its module's names, when no other thread gets the lock any more."""

    def __init__(self) -> None:
        self._tell, self._sleep = _is_finalized.set, time.sleep

    def __del__(self) -> None:
        self._tell()
        self._sleep(1.0)


def _held(loop: asyncio.BaseEventLoop, *args: Any, **kwargs: Any) -> asyncio.Handle:
    handle = _call_soon_threadsafe(loop, *args, **kwargs)
    if isinstance(threading.current_thread(), threading._DummyThread):
        _is_finalized.wait()
    return handle


asyncio.BaseEventLoop.call_soon_threadsafe = _held  # type: ignore[method-assign, assignment]

if __name__ == "__main__":
    _finalized = _Finalized()
    main()
