"""What a training run leaves behind: a JSON-lines log and archives in parts small enough to be carried.

Knows files. Does not know training.
"""

import json
import tarfile
import time
from pathlib import Path

PART_BYTES = 15 * 2**20


class RunLog:
    """Appends one JSON object per line to ``path`` and prints it; without a path it is silent."""

    def __init__(self, path: Path | None, started: float) -> None:
        self._path = path
        self._started = started

    def write(self, event: str, **values: object) -> None:
        if self._path is None:
            return
        line = json.dumps({"event": event, "seconds": round(time.time() - self._started, 1)} | values)
        with self._path.open("a") as log:
            log.write(line + "\n")
        print(line, flush=True)


def pack(folder: Path, destination: Path) -> list[Path]:
    """Write ``folder`` as ``<name>.tar.00``, ``.01``... of at most `PART_BYTES` into ``destination``.

    They are joined again by ``cat <name>.tar.* | tar x``.
    """
    whole = destination / f"{folder.name}.tar"
    with tarfile.open(whole, "w") as archive:
        archive.add(folder, arcname=folder.name)
    parts: list[Path] = []
    with whole.open("rb") as archive_bytes:
        while chunk := archive_bytes.read(PART_BYTES):
            part = destination / f"{whole.name}.{len(parts):02d}"
            part.write_bytes(chunk)
            parts.append(part)
    whole.unlink()
    return parts
