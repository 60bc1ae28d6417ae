"""Reads of the job table from the event loop.

Knows: that a file on this host answers at once, and a server may not. Does not know: what is read.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fastapi.concurrency import run_in_threadpool

from server.database import Database

Given = ParamSpec("Given")
Found = TypeVar("Found")


async def look(
    database: Database, read: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs
) -> Found:
    """What ``read`` returns. SQLite is asked here: a reader never waits, and a thread would cost more."""
    if database.is_remote:
        return await run_in_threadpool(read, *args, **kwargs)
    return read(*args, **kwargs)
