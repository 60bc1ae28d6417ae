"""A job in the worker's hands: what the worker says becomes rows and files.

Knows: one claim, the worker's pipe, the job table and the job's files. Does not know: which job comes next,
or what to do about a dead worker.
"""

import time
from contextlib import suppress
from dataclasses import dataclass

from configs.job import (
    CheckpointSaved,
    DeviceReleased,
    JobFinished,
    JobPaths,
    JobResult,
    PreviewReady,
    Stage,
    StageFinished,
    StageStarted,
    StepFinished,
)
from server import logs, progress
from server.claims import Claim, ClaimLostError, ClaimTable
from server.job import Job, JobError
from server.jobs import JobTable
from server.protocol import CancelJob, JobFailed, JobMessage, JobProgressed, JobStopped, RunJob
from server.storage.job_files import (
    CheckpointFetched,
    FilesLost,
    FilesStored,
    JobFiles,
    PreviewStored,
    StorageMessage,
)
from server.worker_handle import WorkerHandle

# A job stops within a network block or a frame, on several GPUs within a step (whose time comes on top). One
# that does not stop is ended with its worker.
CANCEL_GRACE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class JobStores:
    """Where a job's state is kept."""

    claims: ClaimTable
    jobs: JobTable
    files: JobFiles


class RunningJob:
    """One attempt. ``holds_device`` turns false when the next job may start, ``has_ended`` at its end.

    Between the worker's last word and the end, the job ``is_storing`` if its files go to another place.
    """

    def __init__(self, job: Job, worker: WorkerHandle | None, stores: JobStores) -> None:
        """Without a worker: to be resumed, not started."""
        self.claim = Claim(job.id, job.attempt)
        self.holds_device = True
        self.has_ended = False
        self.is_storing = False
        self._is_at_worker = False
        self._stage: Stage | None = None
        self._job = job
        self._worker = worker
        self._claims = stores.claims
        self._jobs = stores.jobs
        self._files = stores.files
        self._cancelled_at: float | None = None
        self._longest_step_seconds = 0.0
        self._failure: JobFailed | None = None
        self._is_late = False
        self._deadline_at = None if job.deadline_seconds is None else time.monotonic() + job.deadline_seconds
        prompts = (job.parameters.prompt, job.parameters.negative_prompt)
        self._log = logs.job_logger(job.id, job.attempt, *prompts)

    @property
    def runs_alone(self) -> bool:
        """Whether a worker died with it: a second death must be no other job's fault, or to its cost."""
        return self._job.losses > 0

    @property
    def is_denoising(self) -> bool:
        """Whether the device has memory for more: what comes after it may need all there is."""
        return self._stage == "denoise" and self.holds_device

    @property
    def is_stuck(self) -> bool:
        """Whether it was told to stop long ago."""
        if self._cancelled_at is None:
            return False
        return time.monotonic() >= self._cancelled_at + CANCEL_GRACE_SECONDS + self._longest_step_seconds

    def seconds_to_deadline(self) -> float | None:
        """Until ``check`` has something to do; None: no deadline, or it is over."""
        if self._deadline_at is None or self._is_late:
            return None
        return self._deadline_at - time.monotonic()

    def start(self) -> None:
        """Hand the job to the worker; if its folder cannot be made, it has ended."""
        self._log.info(
            "job_started",
            model=self._job.model,
            steps=self._job.total_steps,
            prompt=self._job.parameters.prompt,  # written only if the settings say so
            negative_prompt=self._job.parameters.negative_prompt,
        )
        try:
            paths = self._files.prepare(self._job)
        except OSError as error:
            self._failure = self._failed(f"the data folder: {error}")
            self.check()
            return
        if paths is not None:
            self._hand_over(paths)

    def resume(self, result: JobResult) -> None:
        """Go on where an earlier supervisor ended: the files are finished, and not all in their place."""
        self.holds_device = False
        self._log.info("job_store_resumed")
        try:
            self._complete(result)
        except ClaimLostError:
            self._cancel()
        if not self.is_storing:
            self._end()

    def check(self) -> None:
        """Stop the worker on a cancel, the job's deletion or its deadline."""
        if self._failure is not None:
            self.handle(self._failure)
            return
        left = self.seconds_to_deadline()
        if left is not None and left <= 0:
            self._is_late = True
            self._cancel()
        try:
            if self._claims.held(self.claim).cancel_requested:
                self._cancel()
        except ClaimLostError:
            self._cancel()

    def handle(self, message: JobMessage) -> None:
        """Write down what the worker says."""
        is_last = not isinstance(message, JobProgressed) or isinstance(message.event, JobFinished)
        if is_last or message == JobProgressed(self.claim, DeviceReleased()):
            self.holds_device = False
        try:
            self._record(message)
        except ClaimLostError:
            self._cancel()
        if is_last and not self.is_storing:
            self._end()

    def handle_storage(self, message: StorageMessage) -> None:
        """Act on what became of the job's files."""
        try:
            match message:
                case CheckpointFetched(paths=paths):
                    self._hand_over(paths)
                case PreviewStored(step=step):
                    self._claims.set_preview(self.claim, step)
                case FilesStored(result=result):
                    self._stored(result)
                    self._end()
                case FilesLost(message=reason):
                    self._record(self._failed(f"the finished file cannot be stored: {reason}"))
                    self._end()
        except ClaimLostError:
            self._cancel()

    def worker_died(self, cause: str, *, is_to_blame: bool) -> None:
        """The attempt is lost; the job runs again or fails."""
        self._log.error("job_lost", cause=cause)
        with suppress(ClaimLostError):
            if self._is_over():
                self._claims.fail(self.claim, self._late_error())
            elif is_to_blame and self._is_at_worker:
                self._claims.lose(self.claim, cause)
            else:
                self._claims.requeue(self.claim)
        self._end()

    def give_back(self) -> None:
        """Queue the job again because the server stops. The worker must be dead."""
        self._log.info("job_requeued")
        with suppress(ClaimLostError):
            self._claims.requeue(self.claim)
        self._end()

    def _record(self, message: JobMessage) -> None:
        match message:
            case JobProgressed(event=StageStarted(stage)):
                self._stage = stage
                self._claims.enter_stage(self.claim, stage, progress.at_stage(stage))
            case JobProgressed(event=StageFinished(stage, seconds)):
                self._claims.finish_stage(self.claim, stage, seconds)
            case JobProgressed(event=StepFinished() as step):
                self._finish_step(step)
            case JobProgressed(event=CheckpointSaved(step, size)):
                self._claims.set_checkpoint(self.claim, step)
                self._files.save_checkpoint(self.claim)
                self._log.debug("checkpoint_saved", step=step, bytes=size)
            case JobProgressed(event=PreviewReady(step, jpeg)):
                self._show(step, jpeg)
            case JobProgressed(event=JobFinished(result)):
                self._complete(result)
            case JobStopped():
                self._stopped()
            case JobFailed(error=error):
                self._fail(error)

    def _finish_step(self, event: StepFinished) -> None:
        self._longest_step_seconds = max(self._longest_step_seconds, event.seconds)
        percent = progress.after_step(event.step, event.total_steps)
        job = self._claims.finish_step(self.claim, event.step, event.seconds, percent)
        if job.cancel_requested:
            self._cancel()

    def _show(self, step: int, jpeg: bytes) -> None:
        try:
            is_shown = self._files.show(self.claim, step, jpeg)
        except OSError as error:  # the job was deleted, or the disk is full: a preview is not worth a job
            self._log.warning("preview_not_written", step=step, message=str(error))
            return
        if is_shown:
            self._claims.set_preview(self.claim, step)

    def _complete(self, result: JobResult) -> None:
        self._claims.enter_stage(self.claim, "store", progress.at_stage("store"))
        try:
            is_stored = self._files.publish(self.claim, result)
        except OSError as error:  # also when it was deleted just now: then the write finds the claim lost
            self._record(self._failed(f"the finished file cannot be stored: {error}"))
            return
        if is_stored:
            self._stored(result)
            return
        self.is_storing = True
        self._is_at_worker = False
        if self._cancelled_at is not None:
            self._end_at_once()

    def _stored(self, result: JobResult) -> None:
        self._claims.complete(self.claim, result)
        self._log.info(
            "job_completed", seconds=round(result.metrics.total_seconds, 3), bytes=result.file.bytes
        )

    def _stopped(self) -> None:
        if self._is_over():
            self._fail(self._late_error())
            return
        self._claims.finish_cancel(self.claim)
        self._log.info("job_cancelled")

    def _fail(self, error: JobError) -> None:
        self._claims.fail(self.claim, error)
        self._log.warning("job_failed", code=error.code, message=error.message)

    def _failed(self, message: str) -> JobFailed:
        return JobFailed(self.claim, JobError("internal", message, retryable=True))

    def _is_over(self) -> bool:
        return self._is_late and not self._claims.held(self.claim).cancel_requested

    def _late_error(self) -> JobError:
        message = f"the job ran longer than its deadline_seconds, {self._job.deadline_seconds:g}"
        return JobError("deadline_exceeded", message, retryable=False)

    def _cancel(self) -> None:
        if self._cancelled_at is None:
            self._cancelled_at = time.monotonic()
            self._log.info("job_cancelling", deadline_exceeded=self._is_late)
            if self._is_at_worker and self._worker is not None:
                self._worker.send(CancelJob(self.claim))
        if not self._is_at_worker:
            self._end_at_once()

    def _end_at_once(self) -> None:
        # Only files are on their way: nobody has to stop first, and what comes late finds the claim gone.
        if self.has_ended:
            return
        with suppress(ClaimLostError):
            self._stopped()
        self._end()

    def _hand_over(self, paths: JobPaths) -> None:
        assert self._worker is not None
        self._is_at_worker = True
        self._worker.send(RunJob(self.claim, self._job.parameters, paths))

    def _end(self) -> None:
        # The files follow the row, whatever made it what it is.
        if self.has_ended:
            return
        job_id = self.claim.job_id
        job = self._jobs.find(job_id)
        self.has_ended = True
        self.holds_device = False
        if job is None or job.status in {"failed", "cancelled"}:
            self._files.remove(job_id)
        elif job.status == "completed":
            self._files.finish(self.claim, job.attempt)
        else:
            self._files.discard(self.claim)
