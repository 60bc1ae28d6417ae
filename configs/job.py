"""The job contract between server and pipelines: what goes in, what is told on the way, what comes out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from configs.attention import AttentionBackend, AttentionConfig, AttentionPrecision, WindowUnit
from configs.compute import ComputeReport, ModelPrecision, StepCache
from configs.memory import OffloadLevel

Stage = Literal["load", "text_encode", "denoise", "vae_decode", "encode_mp4", "store"]
STAGES: tuple[Stage, ...] = ("load", "text_encode", "denoise", "vae_decode", "encode_mp4", "store")

ErrorCode = Literal[
    "invalid_input",
    "out_of_memory",
    "worker_lost",
    "deadline_exceeded",
    "bad_output",
    "model_load_failed",
    "shutdown",
    "internal",
]
MAX_SEED = 2**32 - 1


class JobParameters(BaseModel):
    """One clip, fully resolved: nothing here is rounded or defaulted later."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    prompt: str
    negative_prompt: str
    width: int
    height: int
    num_frames: int
    fps: int
    num_inference_steps: int
    guidance_scale: float
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)]
    attention: AttentionConfig
    step_cache: StepCache = "off"
    checkpoint_every: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Save the latents after every so many steps; 0: only before the decode."
    )


class ParallelReport(BaseModel):
    """How several ranks denoised a clip together; bytes are those that one rank receives from others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ranks: int
    guidance: Literal["split", "together"] | None = Field(
        description="split: each half of the ranks computes one of a step's two passes; null: there is one."
    )
    token_ranks: int = Field(description="Ranks that share the tokens of a pass.")
    sparse_exchange: Literal["anchors", "heads"] | None = Field(
        description="What sparse calls exchange; dense ones exchange heads."
    )
    sparse_call_bytes: int = Field(description="Received in a sparse call, on the average.")
    dense_call_bytes: int = Field(description="The same of a dense call.")


class AttentionReport(BaseModel):
    """What attention really ran in a job's self-attention layers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: AttentionBackend
    implementation: str = Field(
        description="Of the sparse calls: torch, triton (any GPU), gluon (Hopper); of the dense ones if "
        "there were no others. Several are joined by +."
    )
    dense_implementation: str = Field(
        default="sdpa", description="Of the dense calls: sdpa (PyTorch) or gluon (Hopper)."
    )
    token_order: Literal["raster", "tile"] | None = None
    block_size: int | None = None
    block_unit: Literal["tokens", "frames"] | None = None
    tile_thw: tuple[int, int, int] | None = None
    anchor_stride: int | None = None
    anchor_offset: int | None = Field(default=None, description="Of the first step.")
    anchor_rotation: bool | None = None
    precision: AttentionPrecision | None = Field(
        default=None, description="Of the sparse calls: full or fp8; null for backends without the choice."
    )
    window: tuple[int | None, int | None] | None = Field(
        default=None, description="Units to the left and to the right that a token sees; null is unbounded."
    )
    window_unit: WindowUnit | None = None
    global_frames: int | None = None
    top_k: float | None = Field(
        default=None, description="Boxes that a box keeps: below 1 a share of all, else a count."
    )
    pooled_rest: bool | None = None
    sink_mode: Literal["null_logit", "key0_bias"] | None = None
    tokens: int = Field(description="Of the clip, in one forward pass of the model.")
    text_tokens: int = Field(
        default=0, description="Beside them in self-attention, in models where text takes part; no padding."
    )
    density: float = Field(
        description="Allowed pairs / tokens squared of a sparse call, as counted where it depends on the "
        "content (block_topk); 1 when dense."
    )
    sparse_calls: int
    dense_calls: int
    dense_reasons: dict[str, int] = Field(
        default_factory=dict,
        description="Why calls ran dense: backend, dense_steps, ...",
    )
    parallel: ParallelReport | None = Field(default=None, description="On several ranks; else null.")


class StepSeconds(BaseModel):
    """Seconds of one denoise step, over a job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    median: float
    p95: float
    max: float


class JobMetrics(BaseModel):
    """Where a job's time and memory went. Memory: device bytes on a GPU, resident set size on a CPU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    load_seconds: float = 0.0
    text_encode_seconds: float = 0.0
    step_seconds: StepSeconds | None = None
    denoise_seconds: float = 0.0
    vae_decode_seconds: float = 0.0
    encode_seconds: float = 0.0
    total_seconds: float = 0.0
    peak_memory_bytes: int = 0
    peak_memory_by_stage: dict[Stage, int] = Field(
        default_factory=dict, description="Of the rank that had most, where there are several."
    )
    peak_memory_by_rank: tuple[int, ...] = Field(
        default=(), description="On several ranks: rank 0's, then the others' in the denoise."
    )


class VideoFile(BaseModel):
    """What probing the finished MP4 found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int
    sha256: str
    codec: str
    pixel_format: str
    width: int
    height: int
    frames: int
    fps: float


class PictureFile(BaseModel):
    """A still picture beside the video."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int
    sha256: str
    content_type: str
    width: int
    height: int


DecodeRung = Literal["whole", "tiled", "small_tiles", "cpu"]


class MemoryReport(BaseModel):
    """How a job was fitted into the device's memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    offload: OffloadLevel = Field(description="Which weights left the device: none, encoder, model or group.")
    lowered_from: OffloadLevel | None = Field(
        default=None, description="The level that was planned, where less memory was free than predicted."
    )
    feed_forward_chunks: int = Field(description="Slices in which the feed-forward ran; 1: in one.")
    available_bytes: int = Field(description="What weights and activations could take together.")
    predicted_peak_by_stage: dict[Stage, int] = Field(
        description="Bytes, weights included; beside metrics.peak_memory_by_stage, which was measured."
    )


class DecodeReport(BaseModel):
    """How the latents were decoded, and what had run out of memory before that.

    ``fused``: whether the decoder ran kernels of our own between convolutions, or on a CPU their like.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rung: DecodeRung
    failed: tuple[DecodeRung, ...] = ()
    fused: bool = False


class RunEnvironment(BaseModel):
    """What ran a job, besides its parameters: needed to make the same clip again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = Field(description="Folder or hub id of the model.")
    revision: str | None
    pipeline: str = Field(description="Class of the Diffusers pipeline.")
    scheduler: str = Field(description="Class of the scheduler.")
    device: str
    dtype: str
    vae_dtype: str
    compiled: bool = Field(default=False, description="Whether the transformer's blocks ran compiled.")
    fused: bool = Field(default=False, description="Whether they ran kernels of our own between products.")
    precision: ModelPrecision = Field(default="full", description="Of the linear layers in these blocks.")
    versions: dict[str, str] = Field(description="Of reelwright, torch, diffusers, transformers and triton.")


class JobResult(BaseModel):
    """A finished job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: VideoFile
    thumbnail: PictureFile | None = None
    spritesheet: PictureFile | None = None
    decode: DecodeReport | None = None
    memory: MemoryReport | None = None
    compute: ComputeReport | None = None
    resumed_from_step: int | None = Field(
        default=None, description="Denoise steps that an earlier attempt had saved; None: none was used."
    )
    environment: RunEnvironment | None = None
    metrics: JobMetrics
    attention: AttentionReport
    device: str
    dtype: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StageStarted:
    """A stage begins."""

    stage: Stage


@dataclass(frozen=True, slots=True)
class StageFinished:
    """A stage ended; its peak memory, or None for one that shares the machine with the next job."""

    stage: Stage
    seconds: float
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class StepFinished:
    """Denoise step ``step`` (from 1) of ``total_steps`` ended; ``seconds`` is device time, synchronised."""

    step: int
    total_steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MemoryPlanned:
    """How the job will be fitted into the device's memory; a second one replaces the first."""

    report: MemoryReport


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """The state after denoise step ``step`` lies on disk; a later attempt starts there."""

    step: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PreviewReady:
    """A small JPEG of what the latents show after denoise step ``step``."""

    step: int
    jpeg: bytes


@dataclass(frozen=True, slots=True)
class DeviceReleased:
    """The job needs the device no more: the next one may start while this one's files are written."""


@dataclass(frozen=True, slots=True)
class JobFinished:
    """The MP4 lies at its path, probed and fsynced. Always the last event."""

    result: JobResult


JobEvent = (
    StageStarted
    | StageFinished
    | StepFinished
    | MemoryPlanned
    | CheckpointSaved
    | PreviewReady
    | DeviceReleased
    | JobFinished
)


@dataclass(frozen=True, slots=True)
class JobPaths:
    """Where a job's files belong; None: that one is not made.

    Attributes:
        video: the MP4.
        thumbnail, spritesheet: JPEG pictures.
        checkpoint: latents and sampler state of the attempt; read if it is there, removed by whoever owns it.
    """

    video: Path
    thumbnail: Path | None = None
    spritesheet: Path | None = None
    checkpoint: Path | None = None


class JobCancelledError(Exception):
    """The cancel flag was seen; nothing of the job is left on the device."""


class JobFailedError(Exception):
    """A job ended without a clip. ``code`` is the public error code."""

    def __init__(self, code: ErrorCode, message: str, *, retryable: bool = False) -> None:
        super().__init__(code, message, retryable)
        self.code: ErrorCode = code
        self.message = message
        self.retryable = retryable

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_failure, (self.code, self.message, self.retryable))


def _rebuild_failure(code: ErrorCode, message: str, retryable: bool) -> JobFailedError:
    return JobFailedError(code, message, retryable=retryable)
