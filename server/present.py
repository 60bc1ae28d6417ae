"""From rows to the objects of the HTTP API.

Knows: both sides' fields. Does not know: SQL or HTTP.
"""

from collections.abc import Sequence

from server.estimates import remaining_seconds
from server.job import Job
from server.jobs import JobTable
from server.schemas import Video, VideoAttention, VideoError, VideoMetrics, VideoProgress
from server.staffing import Staff
from server.timetable import Timetable
from server.workers import WorkerTable


class Presenter:
    """Shows jobs together with their place in the queue and their ETA."""

    def __init__(self, jobs: JobTable, workers: WorkerTable) -> None:
        self._jobs = jobs
        self._workers = workers

    def video(self, job: Job) -> Video:
        """One job."""
        return self.videos([job])[0]

    def videos(self, jobs: Sequence[Job]) -> list[Video]:
        """Several jobs, reading the queue once."""
        models = {job.model for job in jobs if job.status == "queued"}
        staff = Staff(self._workers.all() if models else ())
        tables = {model: Timetable(self._jobs, model, staff) for model in models}
        return [self._video(job, tables.get(job.model), staff) for job in jobs]

    def _video(self, job: Job, table: Timetable | None, staff: Staff) -> Video:
        parameters, result = job.parameters, job.result
        place = table.places.get(job.id) if table else None
        is_queued = job.status == "queued"
        return Video(
            id=job.id,
            model=job.model,
            status=job.status,
            progress=job.progress,
            stage=job.stage,
            step=job.step,
            total_steps=job.total_steps,
            queue_position=place.position if place else None,
            waiting_reason=staff.waiting_reason(job.model, job.gpus) if is_queued else None,
            eta_seconds=_rounded(self._eta_seconds(job, table)),
            cancel_requested=job.cancel_requested,
            attempt=job.attempt,
            created_at=int(job.created_at),
            started_at=_whole(job.started_at),
            completed_at=_whole(job.completed_at),
            prompt=parameters.prompt,
            negative_prompt=parameters.negative_prompt,
            seconds=f"{parameters.num_frames / parameters.fps:g}",
            size=f"{parameters.width}x{parameters.height}",
            num_frames=parameters.num_frames,
            fps=parameters.fps,
            seed=parameters.seed,
            num_inference_steps=parameters.num_inference_steps,
            guidance_scale=parameters.guidance_scale,
            attention=VideoAttention(
                requested=job.attention_asked,
                resolved=parameters.attention,
                ran=result.attention if result else None,
            ),
            device=result.device if result else None,
            dtype=result.dtype if result else None,
            metrics=_metrics(job),
            file=result.file if result else None,
            warnings=[*job.warnings, *(result.warnings if result else ())],
            error=VideoError(code=job.error.code, message=job.error.message, retryable=job.error.retryable)
            if job.error
            else None,
            metadata=job.metadata,
            priority=job.priority,
            deadline_seconds=job.deadline_seconds,
            expires_at=_whole(job.expires_at),
            webhook_url=job.webhook_url,
            checkpoint_every=parameters.checkpoint_every,
            checkpoint_step=job.checkpoint_step,
            resumed_from_step=result.resumed_from_step if result else None,
            preview_step=job.preview_step,
            thumbnail=result.thumbnail if result else None,
            spritesheet=result.spritesheet if result else None,
            decode=result.decode if result else None,
            step_cache=parameters.step_cache,
            compute=result.compute if result else None,
            memory=result.memory if result else None,
        )

    def _eta_seconds(self, job: Job, table: Timetable | None) -> float | None:
        if job.status == "in_progress":
            return remaining_seconds(self._jobs, job)
        return table.end_of(job) if table else None


def progress_of(video: Video) -> VideoProgress:
    """The part of a job that changes with every step."""
    return VideoProgress(
        id=video.id,
        progress=video.progress,
        stage=video.stage,
        step=video.step,
        total_steps=video.total_steps,
        last_step_seconds=video.metrics.last_step_seconds,
        eta_seconds=video.eta_seconds,
        checkpoint_step=video.checkpoint_step,
        preview_step=video.preview_step,
    )


def _metrics(job: Job) -> VideoMetrics:
    measured = job.result.metrics.model_dump() if job.result else {}
    queue_seconds = max(0.0, job.started_at - job.created_at) if job.started_at is not None else None
    return VideoMetrics.model_validate(
        measured | {"queue_seconds": queue_seconds, "last_step_seconds": job.last_step_seconds}
    )


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
