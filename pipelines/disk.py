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
    temporary = path.with_name(f".{path.stem[:MAX_STEM]}.{secrets.token_hex(4)}.tmp{suffix}")
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
