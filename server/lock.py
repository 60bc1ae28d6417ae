"""The lock that keeps a second server off a data folder.

Knows: that the lock belongs to an open file, so it lasts until the last process that shares it is gone.
Does not know: what the folder holds.
"""

import fcntl
import os
import time
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Protocol

# A killed server's children notice within a moment; a device may need longer to let go of its memory.
PATIENCE_SECONDS = 15.0


class DataFolderInUseError(RuntimeError):
    """Another server has the folder."""


class _Detachable(Protocol):
    def detach(self) -> int: ...


class FolderLock:
    """An exclusive lock. Passed to a child process, it is shared with it: a new server starts only
    when the old one's children are gone too, so two workers never hold the device at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[object, ...]:
        return (_from_duplicate, (DupFd(self._descriptor),))

    def release(self) -> None:
        """Give up this process's share."""
        os.close(self._descriptor)


def acquire(path: Path) -> FolderLock:
    """Lock the file. A server that was killed is given time to be gone with its children.

    Raises:
        DataFolderInUseError: a living server keeps it; the message names its process.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not _try_lock(descriptor):
        owner = os.pread(descriptor, 32, 0).decode().strip()
        if _is_alive(owner) or time.monotonic() >= give_up_at:
            os.close(descriptor)
            raise DataFolderInUseError(
                f"data folder {path.parent} is in use by another server (process {owner or 'unknown'})"
            )
        time.sleep(0.1)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return FolderLock(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_alive(owner: str) -> bool:
    # A container's new server may have the process number of the one before it: that is not another one.
    if not owner.isdecimal() or int(owner) == os.getpid():
        return False
    try:
        os.kill(int(owner), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _is_zombie(owner)


def _is_zombie(owner: str) -> bool:
    # A killed server whose parent has not asked for its end: it holds nothing any more.
    try:
        status = Path(f"/proc/{owner}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "Z"


def _from_duplicate(duplicate: _Detachable) -> FolderLock:
    return FolderLock(duplicate.detach())
