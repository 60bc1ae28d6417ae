"""The jobs in one worker's hands: one on the device, and one before it that still writes its files.

Knows: when the worker can take another job, and which job a message is about. Does not know: the queue,
or the worker's life.
"""

from server.job import Job
from server.protocol import JobMessage
from server.running_job import JobStores, RunningJob
from server.worker_handle import WorkerHandle

MOST_JOBS = 2


class Slot:
    """At most ``MOST_JOBS`` attempts, of which at most one holds the device."""

    def __init__(self, stores: JobStores) -> None:
        self._stores = stores
        self._held: list[RunningJob] = []

    @property
    def is_empty(self) -> bool:
        """Whether the worker has nothing to do."""
        return not self._held

    @property
    def holds_device(self) -> bool:
        """Whether a job computes."""
        return any(job.holds_device for job in self._held)

    @property
    def is_denoising(self) -> bool:
        """Whether the device is in the midst of the longest part of a job."""
        return any(job.is_denoising for job in self._held)

    @property
    def is_open(self) -> bool:
        """Whether the device is free for another job."""
        may_share = not any(job.runs_alone for job in self._held)
        return not self.holds_device and len(self._held) < MOST_JOBS and (may_share or self.is_empty)

    def start(self, job: Job, worker: WorkerHandle) -> None:
        """Hand a claimed job to the worker."""
        running = RunningJob(job, worker, self._stores)
        self._held.append(running)
        running.start()
        self._forget_ended()

    def check(self) -> RunningJob | None:
        """Pass on cancels and deadlines. Returns a job that should have stopped long ago."""
        for job in self._held:
            job.check()
        return next((job for job in self._held if job.is_stuck), None)

    def seconds_to_deadline(self) -> float:
        """Until ``check`` must be called again."""
        found = (job.seconds_to_deadline() for job in self._held)
        return min((seconds for seconds in found if seconds is not None), default=float("inf"))

    def handle(self, message: JobMessage) -> bool:
        """Write down what the worker says. Returns whether that ended a job."""
        for job in self._held:
            if job.claim == message.claim:
                job.handle(message)
        return self._forget_ended()

    def worker_died(self, cause: str, guilty: RunningJob | None) -> None:
        """Every attempt is lost. None guilty: nobody knows which of them it was."""
        for job in self._held:
            job.worker_died(cause, is_to_blame=guilty is None or guilty is job)
        self._held.clear()

    def give_back(self) -> None:
        """Queue the jobs again because the server stops. The worker must be dead."""
        for job in self._held:
            job.give_back()
        self._held.clear()

    def _forget_ended(self) -> bool:
        before = len(self._held)
        self._held = [job for job in self._held if not job.has_ended]
        return len(self._held) < before
