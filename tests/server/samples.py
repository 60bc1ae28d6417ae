"""Job parameters and results for tests that need no model."""

import hashlib

from configs.attention import AttentionConfig
from configs.job import (
    AttentionReport,
    JobMetrics,
    JobParameters,
    JobResult,
    PictureFile,
    StepSeconds,
    VideoFile,
)
from server.job import NewJob

UNKNOWN_ID = "video_" + "0" * 32
"""Has the form of a job's id, and is none."""


def parameters(model: str = "tiny-wan", steps: int = 4) -> JobParameters:
    """A small clip of 9 frames at 8 fps."""
    return JobParameters(
        model=model,
        prompt="a red circle",
        negative_prompt="",
        width=64,
        height=64,
        num_frames=9,
        fps=8,
        num_inference_steps=steps,
        guidance_scale=1.0,
        seed=7,
        attention=AttentionConfig(block_size=32, anchor_stride=17),
    )


def new_job(
    model: str = "tiny-wan",
    steps: int = 4,
    *,
    owner: str | None = None,
    priority: int = 0,
    key: str | None = None,
    webhook_url: str | None = None,
) -> NewJob:
    """A submission of that clip."""
    return NewJob(
        parameters(model, steps),
        attention_asked=None,
        metadata={"owner": "test"},
        request_sha256="f" * 64,
        idempotency_key=key,
        owner=owner,
        priority=priority,
        webhook_url=webhook_url,
    )


def result() -> JobResult:
    """A plausible result of that clip."""
    return JobResult(
        file=VideoFile(
            bytes=1000,
            sha256="0" * 64,
            codec="h264",
            pixel_format="yuv420p",
            width=64,
            height=64,
            frames=9,
            fps=8.0,
        ),
        metrics=JobMetrics(
            step_seconds=StepSeconds(median=0.5, p95=0.5, max=0.5),
            total_seconds=3.0,
            peak_memory_bytes=123,
        ),
        attention=AttentionReport(
            backend="anchor_local",
            implementation="torch",
            block_size=32,
            anchor_stride=17,
            anchor_offset=0,
            tokens=48,
            density=0.5,
            sparse_calls=6,
            dense_calls=2,
            dense_reasons={"dense_steps": 2},
        ),
        device="cpu",
        dtype="float32",
    )


def result_of(content: bytes) -> JobResult:
    """The same with a video and a thumbnail that both are ``content``."""
    sha256 = hashlib.sha256(content).hexdigest()
    made = result()
    file = made.file.model_copy(update={"bytes": len(content), "sha256": sha256})
    thumbnail = PictureFile(bytes=len(content), sha256=sha256, content_type="image/jpeg", width=64, height=64)
    return made.model_copy(update={"file": file, "thumbnail": thumbnail})
