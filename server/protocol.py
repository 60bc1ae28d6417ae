"""Messages on the pipes: API to supervisor, supervisor to worker, worker to supervisor.

Knows: their shape; they are pickled. Does not know: who acts on them, or how.
"""

from dataclasses import dataclass

from configs.job import JobEvent, JobParameters, JobPaths
from server.claims import Claim
from server.job import JobError

ALIVE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class WakeUp:
    """API to supervisor: the job table changed (a job came, or one is to be cancelled or was deleted)."""


@dataclass(frozen=True, slots=True)
class Drain:
    """API to supervisor: claim nothing more, let the running jobs finish for so long, then end."""

    seconds: float


ApiMessage = WakeUp | Drain


@dataclass(frozen=True, slots=True)
class RunJob:
    """Supervisor to worker: the device is free for this job. One before it may still write its files."""

    claim: Claim
    parameters: JobParameters
    paths: JobPaths


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Supervisor to worker: stop at the next step border; nothing happens if the job has ended."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class EncodeAhead:
    """Supervisor to worker: this job may come next, its text can be encoded while the device is busy."""

    parameters: JobParameters


WorkerCommand = RunJob | CancelJob | EncodeAhead


@dataclass(frozen=True, slots=True)
class ModelLoaded:
    """Worker to supervisor: ready for jobs. Load time, and all the memory that the device has."""

    seconds: float
    device: str
    dtype: str
    memory_total_bytes: int


@dataclass(frozen=True, slots=True)
class ModelLoadFailed:
    """Worker to supervisor, which then sees the worker end."""

    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class Alive:
    """Worker to supervisor, every ``ALIVE_SECONDS`` from its start: the process runs.

    ``memory_in_use_bytes``: by device (of the processes on a CPU); None before the model is loaded.
    """

    memory_in_use_bytes: dict[str, int] | None


@dataclass(frozen=True, slots=True)
class DeviceBroken:
    """Worker to supervisor: no job can use the device any more; replace me when my jobs have ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class JobProgressed:
    """Worker to supervisor: an event of a running job; JobFinished is the last one."""

    claim: Claim
    event: JobEvent


@dataclass(frozen=True, slots=True)
class JobStopped:
    """Worker to supervisor: stopped as asked."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class JobFailed:
    """Worker to supervisor: ended without a video."""

    claim: Claim
    error: JobError


JobMessage = JobProgressed | JobStopped | JobFailed
WorkerMessage = ModelLoaded | ModelLoadFailed | Alive | DeviceBroken | JobMessage
