"""The jobs in one worker's hands: one on the device, and one before it that still writes its files.

Knows: when the worker can take another job, and which job a message is about. Does not know: the queue,
or the worker's life. Jobs whose finished files are on their way to an object store are the worker's no more.
"""

from server.claims import Claim
from server.job import Job
from server.protocol import JobMessage
from server.running_job import JobStores, RunningJob
from server.storage.job_files import StorageMessage
from server.worker_handle import WorkerHandle

MOST_JOBS = 2


class Slot:
    """At most ``MOST_JOBS`` attempts, of which at most one holds the device."""

    def __init__(self, stores: JobStores) -> None:
        self._stores = stores
        self._held: list[RunningJob] = []
        self._storing: list[RunningJob] = []

    @property
    def is_empty(self) -> bool:
        """Whether the worker has nothing to do."""
        return not self._held

    @property
    def is_storing(self) -> bool:
        """Whether finished files are on their way."""
        return bool(self._storing)

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

    @property
    def claims(self) -> list[Claim]:
        """The attempts in the worker's hands."""
        return [job.claim for job in self._held]

    def holds(self, claim: Claim) -> bool:
        """Whether it is one of these attempts."""
        return any(job.claim == claim for job in [*self._held, *self._storing])

    def start(self, job: Job, worker: WorkerHandle) -> None:
        """Hand a claimed job to the worker."""
        running = RunningJob(job, worker, self._stores)
        self._held.append(running)
        running.start()
        self._forget_ended()

    def resume(self, job: Job) -> bool:
        """Publish what an earlier supervisor had finished. Returns whether it had finished this job."""
        result = self._stores.files.finished(Claim(job.id, job.attempt))
        if result is None:
            return False
        running = RunningJob(job, None, self._stores)
        self._storing.append(running)
        running.resume(result)
        self._forget_ended()
        return True

    def check(self) -> RunningJob | None:
        """Pass on cancels and deadlines. Returns a job that should have stopped long ago."""
        for job in [*self._held, *self._storing]:
            job.check()
        self._forget_ended()
        return next((job for job in self._held if job.is_stuck), None)

    def seconds_to_deadline(self) -> float:
        """Until ``check`` must be called again."""
        found = (job.seconds_to_deadline() for job in [*self._held, *self._storing])
        return min((seconds for seconds in found if seconds is not None), default=float("inf"))

    def handle(self, message: JobMessage) -> bool:
        """Write down what the worker says. Returns whether that ended a job."""
        for job in self._held:
            if job.claim == message.claim:
                job.handle(message)
        return self._forget_ended()

    def handle_storage(self, message: StorageMessage) -> None:
        """Act on what became of a job's files; nothing, if the job is over."""
        for job in [*self._held, *self._storing]:
            if job.claim == message.claim:
                job.handle_storage(message)
        self._forget_ended()

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
        going_on = [job for job in [*self._held, *self._storing] if not job.has_ended]
        self._held = [job for job in going_on if not job.is_storing]
        self._storing = [job for job in going_on if job.is_storing]
        return len(self._held) < before
