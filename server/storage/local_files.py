"""A job's files in the data folder, where they stay.

Knows: that a rename and two syncs publish a file. Does not know: other hosts.
"""

from collections.abc import Collection, Iterable

from configs.job import JobPaths, JobResult
from server import logs
from server.claims import Claim
from server.files import DataFolder
from server.job import Job
from server.jobs import JobTable
from server.storage.job_files import StorageMessage


class LocalJobFiles:
    """Implements JobFiles; everything is done when a call returns."""

    is_full = False

    def __init__(self, folder: DataFolder, jobs: JobTable, *, is_shared: bool = False) -> None:
        """``is_shared``: the jobs are in a database elsewhere, which may be the wrong one."""
        self._folder = folder
        self._jobs = jobs
        self._is_shared = is_shared

    def prepare(self, job: Job) -> JobPaths | None:
        return self._folder.prepare(job.id, job.attempt)

    def show(self, claim: Claim, step: int, jpeg: bytes) -> bool:
        self._folder.write_preview(claim.job_id, jpeg)
        return True

    def save_checkpoint(self, claim: Claim) -> None:
        return

    def publish(self, claim: Claim, result: JobResult) -> bool:
        self._folder.sync(claim.job_id)
        return True

    def finished(self, claim: Claim) -> JobResult | None:
        return None

    def stop(self, claim: Claim) -> None:
        return

    def finish(self, claim: Claim, completed_attempt: int) -> None:
        self._folder.finish(claim.job_id, completed_attempt)

    def discard(self, claim: Claim) -> None:
        self._folder.discard(claim.job_id)

    def remove(self, job_id: str) -> None:
        self._folder.remove(job_id)

    def tidy(self, kept: Collection[Claim]) -> None:
        found = self._folder.job_ids() if self._is_shared else []
        if found and not knows_any(self._jobs, found):
            logs.get_logger().warning("tidy_refused", message="no file belongs to a job of this database")
            return
        waiting = {job_id for model in self._jobs.counts() for job_id in self._jobs.queue(model)}
        for path in self._folder.remove_unknown(self._jobs.completed_attempts(), waiting):
            logs.get_logger().info("file_removed", path=str(path))

    def sources(self) -> list[int]:
        return []

    def messages(self) -> list[StorageMessage]:
        return []

    def close(self) -> None:
        return


def knows_any(jobs: JobTable, job_ids: Iterable[str]) -> bool:
    """Whether any of these jobs is in this database; if not, it may be the wrong one."""
    return any(jobs.find(job_id) is not None for job_id in job_ids)
