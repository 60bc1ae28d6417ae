"""The data folder: database file, lock file and finished videos.

Knows: where a job's files lie, and how to remove those that no job knows. Does not know: the job table.
"""

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from server.job import JOB_ID_PATTERN


class DataFolder:
    """Paths below ``root``; a video is ``videos/{job id}/{attempt}.mp4``."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.database = self.root / "jobs.sqlite3"
        self.lock = self.root / "lock"
        self.videos = self.root / "videos"

    def create(self) -> None:
        """Make the folders. Raises OSError when they cannot be made or written."""
        self.videos.mkdir(parents=True, exist_ok=True)

    def video(self, job_id: str, attempt: int) -> Path:
        """Where an attempt's MP4 belongs."""
        return self.videos / job_id / f"{attempt}.mp4"

    def prepare(self, job_id: str, attempt: int) -> Path:
        """Make the folder for an attempt's MP4 and return its path."""
        path = self.video(job_id, attempt)
        path.parent.mkdir(exist_ok=True)
        return path

    def sync(self, job_id: str) -> None:
        """Make the names in a job's folder survive a power cut, as fsync of a file alone does not."""
        for folder in (self.videos / job_id, self.videos):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def discard(self, job_id: str, attempt: int) -> None:
        """Remove what one attempt left, whole or half, and the job's folder if nothing else is in it."""
        folder = self.videos / job_id
        for path in (self.video(job_id, attempt), *folder.glob(f".{attempt}.*")):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()

    def remove(self, job_id: str) -> None:
        """Remove everything of a job. A worker that still writes there is cleaned up after when it stops."""
        shutil.rmtree(self.videos / job_id, ignore_errors=True)

    def remove_unknown(self, completed_attempts: Mapping[str, int]) -> list[Path]:
        """Remove what is not the video of a completed job (id -> attempt). Returns what was removed.

        Only folders with the name of a job are looked into: the data folder may hold other things.
        """
        known = {self.video(job_id, attempt) for job_id, attempt in completed_attempts.items()}
        named = (path for path in self.videos.iterdir() if re.fullmatch(JOB_ID_PATTERN, path.name))
        folders = [path for path in named if path.is_dir() and not path.is_symlink()]
        found = (path for folder in folders for path in folder.iterdir())
        strangers = [path for path in found if path.is_file() and path not in known]
        for path in strangers:
            path.unlink(missing_ok=True)
        for folder in folders:
            with suppress(OSError):  # not empty: a video is in it
                folder.rmdir()
        return strangers
