"""What a supervisor needs of a job's files, wherever they end up.

Knows: the questions, and what is said later because it takes time. Does not know: the answers
(local_files.py, object_files.py), or the rows that follow from them.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from configs.job import JobPaths, JobResult
from server.claims import Claim
from server.job import Job


@dataclass(frozen=True, slots=True)
class CheckpointFetched:
    """What there was to fetch lies at its path, or could not be had: the job can start."""

    claim: Claim
    paths: JobPaths


@dataclass(frozen=True, slots=True)
class PreviewStored:
    """Every API process can show the preview of that step."""

    claim: Claim
    step: int


@dataclass(frozen=True, slots=True)
class FilesStored:
    """The finished files lie in the store, read back and compared."""

    claim: Claim
    result: JobResult


@dataclass(frozen=True, slots=True)
class FilesLost:
    """The finished files cannot be read any more; no further try would help."""

    claim: Claim
    message: str


StorageMessage = CheckpointFetched | PreviewStored | FilesStored | FilesLost


class JobFiles(Protocol):
    """The files of the jobs of one supervisor, called from its loop: nothing here waits for a network."""

    @property
    def is_full(self) -> bool:
        """Whether so many finished jobs wait for the store that no other should start."""
        ...

    def prepare(self, job: Job) -> JobPaths | None:
        """Where the claimed attempt's files belong; None: CheckpointFetched will say. Raises OSError."""
        ...

    def show(self, claim: Claim, step: int, jpeg: bytes) -> bool:
        """Keep a preview. True: it can be seen; False: PreviewStored may say so. Raises OSError."""
        ...

    def save_checkpoint(self, claim: Claim) -> None:
        """A new checkpoint lies at the attempt's path."""
        ...

    def publish(self, claim: Claim, result: JobResult) -> bool:
        """Make the finished files last. False: FilesStored or FilesLost will say so. Raises OSError."""
        ...

    def finished(self, claim: Claim) -> JobResult | None:
        """What an attempt of before the start had finished and not yet published."""
        ...

    def stop(self, claim: Claim) -> None:
        """End everything that still goes on for an attempt; nothing more is said of it."""
        ...

    def finish(self, claim: Claim, completed_attempt: int) -> None:
        """The job is completed, by this attempt or another one: remove all else."""
        ...

    def discard(self, claim: Claim) -> None:
        """The attempt is over and the job goes on: remove what it left but for its checkpoint."""
        ...

    def remove(self, job_id: str) -> None:
        """Remove everything of a job."""
        ...

    def tidy(self, kept: Collection[Claim]) -> None:
        """At a start: remove what belongs to no job; of the attempts in ``kept`` everything stays."""
        ...

    def sources(self) -> list[int]:
        """File descriptors that become readable when there are messages."""
        ...

    def messages(self) -> list[StorageMessage]:
        """What has happened since the last call."""
        ...

    def close(self) -> None:
        """End what goes on. A finished file that is not yet stored stays, for ``finished``."""
        ...
