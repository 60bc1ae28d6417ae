"""One job as the table holds it.

Knows: the columns and their types. Does not know: SQL, HTTP, files.
"""

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from configs.attention import AttentionOverrides
from configs.job import ErrorCode, JobParameters, JobResult, Stage

JobStatus = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
FINAL_STATUSES: frozenset[JobStatus] = frozenset({"completed", "failed", "cancelled"})
JOB_ID_PATTERN = r"^video_[0-9a-f]{32}$"


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job failed. ``retryable``: the same request may succeed later."""

    code: ErrorCode
    message: str
    retryable: bool

    def to_json(self) -> str:
        return json.dumps({"code": self.code, "message": self.message, "retryable": self.retryable})


@dataclass(frozen=True, slots=True)
class NewJob:
    """What a submission writes. Submissions of one owner with one idempotency key make one job.

    ``owner`` is the SHA-256 (hex) of the API key; None: the server asks for no key.
    """

    parameters: JobParameters
    attention_asked: AttentionOverrides | None
    metadata: dict[str, str]
    request_sha256: str
    idempotency_key: str | None = None
    owner: str | None = None
    priority: int = 0
    deadline_seconds: float | None = None
    webhook_url: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One row. Times are seconds since 1970; ``attempt`` counts claims, ``losses`` dead workers.

    ``checkpoint_step`` denoise steps need not run again; ``steps_run`` and ``denoise_seconds`` are those of
    this attempt. ``warnings`` are those of the submission; the run's are in its result. ``worker`` is the
    slot that holds the job, or held it last. ``gpus`` is what a worker has that takes it; None: any number.
    ``finished_stage`` is the last one of this attempt whose duration was recorded.
    """

    id: str
    version: int
    status: JobStatus
    model: str
    parameters: JobParameters
    attention_asked: AttentionOverrides | None
    metadata: dict[str, str]
    idempotency_key: str | None
    request_sha256: str
    shape: str
    total_steps: int
    attempt: int
    losses: int
    cancel_requested: bool
    stage: Stage | None
    step: int
    progress: int
    last_step_seconds: float | None
    denoise_seconds: float
    created_at: float
    started_at: float | None
    completed_at: float | None
    error: JobError | None
    result: JobResult | None
    priority: int
    owner: str | None
    deadline_seconds: float | None
    expires_at: float | None
    checkpoint_step: int
    preview_step: int
    webhook_url: str | None
    steps_run: int
    warnings: tuple[str, ...]
    worker: str | None
    gpus: int | None
    finished_stage: Stage | None

    @property
    def is_final(self) -> bool:
        """Whether the status can no longer change."""
        return self.status in FINAL_STATUSES

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Parse one row of ``SELECT *``."""
        columns = dict(row)
        asked, error, result = columns["attention_asked"], columns["error"], columns["result"]
        return cls(
            **columns
            | {
                "parameters": JobParameters.model_validate_json(columns["parameters"]),
                "attention_asked": AttentionOverrides.model_validate_json(asked) if asked else None,
                "metadata": json.loads(columns["metadata"]),
                "cancel_requested": bool(columns["cancel_requested"]),
                "error": JobError(**json.loads(error)) if error else None,
                "result": JobResult.model_validate_json(result) if result else None,
                "warnings": tuple(json.loads(columns["warnings"])),
            }
        )


def new_job_id(newest: str | None = None) -> str:
    """An id that cannot be guessed and sorts by time, but always after ``newest``: clocks are set back."""
    tick = time.time_ns()
    if newest is not None:
        tick = max(tick, int(newest.removeprefix("video_")[:16], 16) + 1)
    return f"video_{tick:016x}{secrets.token_hex(8)}"


def shape_key(parameters: JobParameters) -> str:
    """Jobs with the same key take the same time per denoise step."""
    doubled = parameters.guidance_scale > 1.0
    grid = f"{parameters.width}x{parameters.height}x{parameters.num_frames}"
    cache = "" if parameters.step_cache == "off" else f" cache={parameters.step_cache}"
    return f"{parameters.model} {grid} guided={doubled} {parameters.attention.model_dump_json()}{cache}"
