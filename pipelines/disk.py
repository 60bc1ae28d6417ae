"""Files that are at their name only when they are whole.

Knows: temporary names, flushing to disk, renaming. Does not know: what is in a file. A writer fills a
temporary file beside the final one; names of temporary files start with a dot.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

MAX_STEM = 40  # characters of the final name in the temporary one; names end at 255 bytes


@contextlib.contextmanager
def written_beside(path: Path, suffix: str) -> Iterator[Path]:
    """Give a temporary name in the folder of ``path``; at the end of the block that file replaces ``path``.

    If the block raises, nothing of the temporary file is left and ``path`` is as it was.

    Raises:
        OSError: flushing or renaming failed.
    """
    temporary = temporary_beside(path, suffix)
    try:
        yield temporary
        put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_beside(path: Path, suffix: str) -> Path:
    """A name in the folder of ``path`` that no other file has."""
    return path.with_name(f".{path.stem[:MAX_STEM]}.{secrets.token_hex(4)}.tmp{suffix}")


def put_in_place(temporary: Path, path: Path) -> None:
    """Once it is on disk, the file replaces ``path``."""
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
