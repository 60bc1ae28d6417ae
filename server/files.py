"""The data folder: database file, lock file and finished videos.

Knows: where a job's files lie, and how to remove those that no job knows. Does not know: the job table.
"""

import os
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from configs.job import JobPaths
from server import logs
from server.job import JOB_ID_PATTERN

CHECKPOINT = "checkpoint.safetensors"
PREVIEW = "preview.jpg"


class DataFolder:
    """Paths below ``root``; a job's files lie in ``videos/{job id}``.

    ``{attempt}.mp4`` and the two pictures beside it belong to an attempt: they are a completed job's. The
    checkpoint and the newest preview belong to the job, until it ends.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.database = self.root / "jobs.sqlite3"
        self.lock = self.root / "lock"
        self.worker_name = self.root / "worker_name"
        self.drain_note = self.root / "drained.json"
        self.videos = self.root / "videos"

    def create(self) -> None:
        """Make the folders. Raises OSError when they cannot be made or written."""
        self.videos.mkdir(parents=True, exist_ok=True)

    def video(self, job_id: str, attempt: int) -> Path:
        """Where an attempt's MP4 belongs."""
        return self.videos / job_id / f"{attempt}.mp4"

    def thumbnail(self, job_id: str, attempt: int) -> Path:
        """Where an attempt's one picture belongs."""
        return self.videos / job_id / f"{attempt}.thumbnail.jpg"

    def spritesheet(self, job_id: str, attempt: int) -> Path:
        """Where an attempt's sheet of small pictures belongs."""
        return self.videos / job_id / f"{attempt}.spritesheet.jpg"

    def preview(self, job_id: str) -> Path:
        """Where the newest preview of a running job belongs."""
        return self.videos / job_id / PREVIEW

    def checkpoint(self, job_id: str) -> Path:
        """Where the state lies from which the next attempt goes on."""
        return self.videos / job_id / CHECKPOINT

    def prepare(self, job_id: str, attempt: int) -> JobPaths:
        """Make the job's folder and return where an attempt's files belong. Raises OSError."""
        self.videos.mkdir(exist_ok=True)  # somebody may have cleared the data folder
        (self.videos / job_id).mkdir(exist_ok=True)
        return JobPaths(
            video=self.video(job_id, attempt),
            thumbnail=self.thumbnail(job_id, attempt),
            spritesheet=self.spritesheet(job_id, attempt),
            checkpoint=self.checkpoint(job_id),
        )

    def write_preview(self, job_id: str, jpeg: bytes) -> None:
        """Replace the preview at once; a reader sees the old one or the new one. Raises OSError."""
        path = self.preview(job_id)
        temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.tmp.jpg")
        try:
            temporary.write_bytes(jpeg)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def sync(self, job_id: str) -> None:
        """Make the names in a job's folder survive a power cut, as fsync of a file alone does not."""
        for folder in (self.videos / job_id, self.videos):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def discard(self, job_id: str) -> None:
        """Remove what an attempt left, whole or half, but not the checkpoint. Nobody may write there."""
        self.keep_only(job_id, {self.checkpoint(job_id)})

    def discard_attempt(self, job_id: str, attempt: int, *, kept: Path) -> None:
        """Remove what one attempt left, whole or half, but for one file. It may write there no more."""
        beginnings = (f"{attempt}.", f".{attempt}.")
        others = {path for path in self.entries(job_id) if not path.name.startswith(beginnings)}
        self.keep_only(job_id, others | {kept})

    def finish(self, job_id: str, attempt: int) -> None:
        """Remove all but a completed attempt's files."""
        self.keep_only(job_id, self._results(job_id, attempt))

    def remove(self, job_id: str) -> None:
        """Remove everything of a job. A worker that still writes there is cleaned up after when it stops."""
        shutil.rmtree(self.videos / job_id, ignore_errors=True)

    def remove_unknown(
        self, completed_attempts: Mapping[str, int], resumable: Collection[str] = ()
    ) -> list[Path]:
        """Remove what belongs neither to a completed job (id -> attempt) nor to one that will go on.

        Returns what was removed. Only folders with the name of a job are looked into: the data folder may
        hold other things.
        """
        known = {path for job in completed_attempts.items() for path in self._results(*job)}
        known |= {self.checkpoint(job_id) for job_id in resumable}
        return [path for job_id in self.job_ids() for path in self.keep_only(job_id, known)]

    def job_ids(self) -> list[str]:
        """The jobs that have a folder."""
        named = (path for path in _entries(self.videos) if re.fullmatch(JOB_ID_PATTERN, path.name))
        return [path.name for path in named if path.is_dir() and not path.is_symlink()]

    def entries(self, job_id: str) -> list[Path]:
        """What lies in a job's folder."""
        return _entries(self.videos / job_id)

    def keep_only(self, job_id: str, known: Collection[Path]) -> list[Path]:
        """Remove a job's other files, and its folder when it is empty; returns what was removed."""
        return _remove_strangers(self.videos / job_id, known)

    def _results(self, job_id: str, attempt: int) -> set[Path]:
        return {
            self.video(job_id, attempt),
            self.thumbnail(job_id, attempt),
            self.spritesheet(job_id, attempt),
        }


def _remove_strangers(folder: Path, known: Collection[Path]) -> list[Path]:
    """What cannot be removed stays and is logged: a file too many must not stop the server."""
    removed = []
    for path in _entries(folder):
        try:
            if path not in known and path.is_file():
                path.unlink(missing_ok=True)
                removed.append(path)
        except OSError as error:
            _log_leftover(path, error)
    with suppress(OSError):  # not empty: a file of the job is in it
        folder.rmdir()
    return removed


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:  # the job was deleted just now
        return []
    except OSError as error:
        _log_leftover(folder, error)
        return []


def _log_leftover(path: Path, error: OSError) -> None:
    logs.get_logger().warning("file_not_removed", path=str(path), message=str(error))
