"""The HTTP bodies: what a client may send and what it gets.

Knows: field names, types and bounds of the public API. Does not know: where the values come from
(server/present.py) or how a body is parsed (server/bodies.py).
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from configs.attention import AttentionConfig, AttentionOverrides
from configs.compute import ComputeReport, StepCache
from configs.job import (
    AttentionReport,
    DecodeReport,
    ErrorCode,
    MemoryReport,
    PictureFile,
    Stage,
    StepSeconds,
    VideoFile,
)
from configs.manifest import Manifest
from configs.memory import DeviceStage, OffloadLevel
from configs.model_preset import GenerationDefaults, GenerationLimits
from configs.resolve import WITHOUT_NUL, GenerationRequest
from server.job import JOB_ID_PATTERN, JobStatus

MetadataKey = Annotated[str, Field(min_length=1, max_length=64), WITHOUT_NUL]
MetadataValue = Annotated[str, Field(max_length=512), WITHOUT_NUL]


def _number(value: Any) -> Any:
    # The OpenAI package sends seconds as a string, in JSON too.
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value[:32]!r} is not a number of seconds") from None
    if not math.isfinite(number):
        raise ValueError(f"{value[:32]!r} is not a finite number of seconds")
    return number


class JobOptions(BaseModel):
    """What a submission may say about its job, whatever the clip."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] = Field(
        default={}, description="Up to 16 strings of your own; echoed."
    )
    priority: Annotated[int, Field(ge=-100, le=100)] = Field(
        default=0, description="Higher runs first; among equals the oldest."
    )
    deadline_seconds: Annotated[float, Field(gt=0, le=604_800, allow_inf_nan=False)] | None = Field(
        default=None, description="Longest run; time in the queue is not counted."
    )
    webhook_url: Annotated[str, Field(max_length=2048)] | None = Field(
        default=None, description="Gets a signed message when the job ends."
    )
    checkpoint_every: Annotated[int, Field(ge=0, le=100_000)] | None = Field(
        default=None, description="Save the latents after every so many steps; default 0: only before decode."
    )


class VideoRequest(GenerationRequest, JobOptions):
    """The body of ``POST /v1/videos``."""

    seconds: Annotated[
        Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)] | None, BeforeValidator(_number)
    ] = Field(
        default=None, description="Length; a number or a string. Becomes the nearest valid frame count."
    )
    model: Annotated[str, Field(max_length=256)] | None = None
    input_reference: str | None = Field(
        default=None, description="A picture: a file of a form, or a data URL. No served model takes one yet."
    )


class RerunRequest(JobOptions):
    """The body of ``POST /v1/videos`` that makes a clip again."""

    manifest: Manifest = Field(
        description="The answer of GET /v1/videos/{id}/manifest. Its parameters run exactly."
    )


class ListQuery(BaseModel):
    """Query of ``GET /v1/videos``."""

    model_config = ConfigDict(extra="forbid")

    after: Annotated[str, Field(pattern=JOB_ID_PATTERN)] | None = Field(
        default=None, description="The last id of the page before."
    )
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    status: JobStatus | None = None


class ContentQuery(BaseModel):
    """Query of ``GET /v1/videos/{id}/content``."""

    model_config = ConfigDict(extra="forbid")

    variant: Literal["video", "thumbnail", "spritesheet", "preview"] = Field(
        default="video", description="preview: the newest picture of a job that runs."
    )


class AnyQuery(ListQuery, ContentQuery):
    """Every query parameter there is, for naming the nearest one."""


class VideoAttention(BaseModel):
    """Attention asked for in the request, resolved for this clip, and as it ran."""

    requested: AttentionOverrides | None
    resolved: AttentionConfig
    ran: AttentionReport | None


class VideoMetrics(BaseModel):
    """Where a job's time and memory went; null where it did not get that far."""

    queue_seconds: float | None = None
    load_seconds: float | None = None
    text_encode_seconds: float | None = None
    last_step_seconds: float | None = None
    step_seconds: StepSeconds | None = None
    denoise_seconds: float | None = None
    vae_decode_seconds: float | None = None
    encode_seconds: float | None = None
    total_seconds: float | None = None
    peak_memory_bytes: int | None = None
    peak_memory_by_stage: dict[Stage, int] | None = None
    peak_memory_by_rank: tuple[int, ...] | None = None


class VideoError(BaseModel):
    """Why a job failed."""

    code: ErrorCode
    message: str
    retryable: bool


class Video(BaseModel):
    """A job. Times are Unix seconds; ``seconds`` is the clip's exact length; ``progress`` is percent."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: JobStatus
    progress: int
    stage: Stage | None
    step: int
    total_steps: int
    queue_position: int | None
    waiting_reason: str | None = Field(
        description="Why no living worker takes a queued job; null: one does, in its turn."
    )
    eta_seconds: float | None
    cancel_requested: bool
    attempt: int
    created_at: int
    started_at: int | None
    completed_at: int | None
    prompt: str
    negative_prompt: str
    seconds: str
    size: str
    num_frames: int
    fps: int
    seed: int
    num_inference_steps: int
    guidance_scale: float
    attention: VideoAttention
    device: str | None
    dtype: str | None
    metrics: VideoMetrics
    file: VideoFile | None
    warnings: list[str]
    error: VideoError | None
    metadata: dict[str, str]
    priority: int
    deadline_seconds: float | None
    expires_at: int | None = Field(
        description="Record and files are removed then; null: never, or not yet set."
    )
    webhook_url: str | None
    checkpoint_every: int
    checkpoint_step: int = Field(description="Denoise steps that another attempt need not run again.")
    resumed_from_step: int | None = Field(description="Steps that an earlier attempt had saved; null: none.")
    preview_step: int = Field(description="Denoise step of the newest preview picture; 0: there is none.")
    thumbnail: PictureFile | None
    spritesheet: PictureFile | None
    decode: DecodeReport | None
    step_cache: StepCache
    compute: ComputeReport | None = Field(description="How the transformer was computed, once it has been.")
    memory: MemoryReport | None


class VideoList(BaseModel):
    """One page of jobs."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(BaseModel):
    """Answer to a delete."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class VideoProgress(BaseModel):
    """Data of a ``progress`` event."""

    id: str
    progress: int
    stage: Stage | None
    step: int
    total_steps: int
    last_step_seconds: float | None
    eta_seconds: float | None
    checkpoint_step: int
    preview_step: int


class VideoPreview(BaseModel):
    """Data of a ``preview`` event: a small JPEG of what the latents show after a step."""

    id: str
    step: int
    data_url: str


class FittingClip(BaseModel):
    """A clip that the device has room for."""

    size: str
    num_frames: int


class VideoEstimate(BaseModel):
    """What a submission would become, and what it would take. Nothing is queued.

    ``density`` is that of a sparse attention call; ``mean_density`` is over all calls, dense ones included.
    """

    object: Literal["video.estimate"] = "video.estimate"
    model: str
    size: str
    num_frames: int
    fps: int
    seconds: str
    num_inference_steps: int
    guidance_scale: float
    seed: int | None = Field(description="null: chosen when submitted.")
    token_grid: tuple[int, int, int] = Field(description="Along time, height and width.")
    tokens: int
    attention: AttentionConfig
    density: float
    mean_density: float
    dense_steps: int
    cut_words: dict[str, list[str]] | None = Field(
        description="Words that the text encoder would not read, by field; null: its tokenizer is not here."
    )
    predicted_seconds: float | None = Field(description="Of the run, once it has started.")
    predicted_peak_memory_bytes: int | None
    basis: Literal["measured", "scaled"] | None = Field(
        description="Jobs of this very shape, or another shape of the model, scaled; null: none has run yet."
    )
    predicted_peak_memory_by_stage: dict[DeviceStage, int] | None = Field(
        description="By formula, scaled by the nearest job that ran; null: model or device not known yet."
    )
    peak_memory_error: float | None = Field(
        description="The formula's largest relative error in recent jobs of the model; null: none ran."
    )
    offload: OffloadLevel | None = Field(description="Which weights would leave the device.")
    memory_total_bytes: int | None = Field(description="Of the worker's device.")
    fits: bool | None
    fits_reason: str
    would_fit: list[FittingClip] = Field(
        description="Where it does not fit: the longest clip of its size and the largest of its length."
    )
    queue_position: int = Field(description="That it would get; 1 is next.")
    starts_in_seconds: float | None
    warnings: list[str]


class Model(BaseModel):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    source: str
    description: str
    state: str
    defaults: GenerationDefaults
    limits: GenerationLimits
    size_multiple: int
    frames_multiple: int = Field(description="num_frames is one more than a multiple of this.")
    attention: AttentionConfig


class ModelList(BaseModel):
    """The models."""

    object: Literal["list"] = "list"
    data: list[Model]


class WorkerStats(BaseModel):
    """A worker of a model; its name is ``local`` unless there may be several."""

    name: str
    state: str
    message: str
    device: str | None
    dtype: str | None
    gpus: int
    load_seconds: float | None
    supervisor_pid: int
    worker_pid: int | None
    heartbeat_age_seconds: float


class QueueStats(BaseModel):
    """Queued jobs that wait for the same workers."""

    gpus: int | None = Field(description="Of a worker that takes them; null: any number.")
    queued: int
    oldest_queued_age_seconds: float
    workers: int = Field(description="Living ones that take these jobs.")
    waiting_reason: str | None = Field(description="Why nobody takes them; null: somebody does.")


class ModelStats(BaseModel):
    """Measured facts about one model; the last job's, and medians over the newest completed ones."""

    model: str
    worker: WorkerStats | None
    workers: list[WorkerStats]
    queued: int
    running: int
    oldest_queued_age_seconds: float | None
    queues: list[QueueStats]
    completed_jobs_seen: int
    last_step_seconds: float | None
    median_step_seconds: float | None
    last_total_seconds: float | None
    median_total_seconds: float | None
    last_peak_memory_bytes: int | None
    last_attention: AttentionReport | None
    density_by_backend: dict[str, float]


class Stats(BaseModel):
    """Answer of ``GET /v1/stats``."""

    version: str
    models: list[ModelStats]


class Health(BaseModel):
    """Answer of the health checks."""

    status: Literal["ok", "unavailable"]
    reason: str | None = None
    warnings: list[str] = Field(default=[], description="Jobs that wait for workers that nobody has started.")
