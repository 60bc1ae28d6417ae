"""A job's files in the data folder, where they stay.

Knows: that a rename and two syncs publish a file. Does not know: other hosts.
"""

from collections.abc import Collection

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

    def __init__(self, folder: DataFolder, jobs: JobTable) -> None:
        self._folder = folder
        self._jobs = jobs

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
        waiting = {job_id for model in self._jobs.counts() for job_id in self._jobs.queue(model)}
        for path in self._folder.remove_unknown(self._jobs.completed_attempts(), waiting):
            logs.get_logger().info("file_removed", path=str(path))

    def sources(self) -> list[int]:
        return []

    def messages(self) -> list[StorageMessage]:
        return []

    def close(self) -> None:
        return
