"""A job in the worker's hands: what the worker says becomes rows and files.

Knows: one claim, the worker's pipe, the job table and the data folder. Does not know: which job comes next,
or what to do about a dead worker.
"""

from contextlib import suppress

from configs.job import JobFinished, JobResult, StageFinished, StageStarted, StepFinished
from server import logs, progress
from server.claims import Claim, ClaimLostError, ClaimTable
from server.files import DataFolder
from server.job import Job, JobError
from server.protocol import CancelJob, JobFailed, JobProgressed, JobStopped, RunJob
from server.worker_handle import WorkerHandle


class RunningJob:
    """One attempt. ``has_ended`` turns true when the worker is free again."""

    def __init__(self, job: Job, worker: WorkerHandle, claims: ClaimTable, files: DataFolder) -> None:
        self.has_ended = False
        self._job = job
        self._claim = Claim(job.id, job.attempt)
        self._worker = worker
        self._claims = claims
        self._files = files
        self._cancel_sent = False
        self._log = logs.get_logger().bind(job=job.id, attempt=job.attempt)

    def start(self) -> None:
        """Hand the job to the worker; if its folder cannot be made, it has ended."""
        self._log.info("job_started", model=self._job.model, steps=self._job.total_steps)
        try:
            paths = self._files.prepare(self._claim.job_id, self._claim.attempt)
        except OSError as error:
            self.handle(
                JobFailed(self._claim, JobError("internal", f"the data folder: {error}", retryable=True))
            )
            return
        self._worker.send(RunJob(self._claim, self._job.parameters, paths))

    def check(self) -> None:
        """Pass on a cancel, or the job's deletion, to the worker."""
        try:
            if self._claims.held(self._claim).cancel_requested:
                self._cancel()
        except ClaimLostError:
            self._cancel()

    def handle(self, message: JobProgressed | JobStopped | JobFailed) -> None:
        """Write down what the worker says."""
        is_last = not isinstance(message, JobProgressed) or isinstance(message.event, JobFinished)
        try:
            self._record(message)
        except ClaimLostError:
            if is_last:
                self._discard()
            else:
                self._cancel()
        self.has_ended = is_last

    def worker_died(self, cause: str) -> None:
        """The attempt is lost; the job runs again or fails."""
        self._log.error("job_lost", cause=cause)
        self._discard()
        with suppress(ClaimLostError):
            self._claims.lose(self._claim, cause)
        self.has_ended = True

    def give_back(self) -> None:
        """Queue the job again because the server stops. The worker must be dead."""
        self._log.info("job_requeued")
        self._discard()
        with suppress(ClaimLostError):
            self._claims.requeue(self._claim)
        self.has_ended = True

    def _record(self, message: JobProgressed | JobStopped | JobFailed) -> None:
        match message:
            case JobProgressed(event=StageStarted(stage)):
                self._claims.enter_stage(self._claim, stage, progress.at_stage(stage))
            case JobProgressed(event=StageFinished(stage, seconds)):
                self._claims.finish_stage(self._claim, stage, seconds)
            case JobProgressed(event=StepFinished() as step):
                self._finish_step(step)
            case JobProgressed(event=JobFinished(result)):
                self._complete(result)
            case JobStopped():
                self._claims.finish_cancel(self._claim)
                self._discard()
                self._log.info("job_cancelled")
            case JobFailed(error=error):
                self._claims.fail(self._claim, error)
                self._discard()
                self._log.warning("job_failed", code=error.code, message=error.message)

    def _finish_step(self, event: StepFinished) -> None:
        percent = progress.after_step(event.step, event.total_steps)
        job = self._claims.finish_step(self._claim, event.step, event.seconds, percent)
        if job.cancel_requested:
            self._cancel()

    def _complete(self, result: JobResult) -> None:
        self._claims.enter_stage(self._claim, "store", progress.at_stage("store"))
        try:
            self._files.sync(self._claim.job_id)
        except FileNotFoundError:  # deleted just now: then the write below finds the claim lost
            gone = JobError("internal", "the finished file is gone from the data folder", retryable=True)
            self._claims.fail(self._claim, gone)
            return
        self._claims.complete(self._claim, result)
        self._log.info(
            "job_completed", seconds=round(result.metrics.total_seconds, 3), bytes=result.file.bytes
        )

    def _cancel(self) -> None:
        if not self._cancel_sent:
            self._cancel_sent = True
            self._log.info("job_cancelling")
            self._worker.send(CancelJob(self._claim))

    def _discard(self) -> None:
        self._files.discard(self._claim.job_id)
