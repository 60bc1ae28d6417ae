"""The manifest of a clip: everything needed to make it again. Written into the MP4 and served over HTTP."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from configs.job import AttentionReport, JobParameters, MemoryReport, RunEnvironment
from configs.memory import OffloadLevel


class Manifest(BaseModel):
    """What ran. ``parameters`` alone, with the same model, make the clip again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    object: Literal["video.manifest"] = "video.manifest"
    version: Literal[1] = 1
    parameters: JobParameters
    attention: AttentionReport
    environment: RunEnvironment
    offload: OffloadLevel | None = Field(
        default=None, description="Which weights left the device; a rerun chooses by its own memory."
    )
    feed_forward_chunks: int | None = Field(default=None, description="Slices in which the feed-forward ran.")

    @classmethod
    def of(
        cls,
        parameters: JobParameters,
        attention: AttentionReport,
        environment: RunEnvironment,
        memory: MemoryReport | None = None,
    ) -> Self:
        """Put the parts together."""
        return cls(
            parameters=parameters,
            attention=attention,
            environment=environment,
            offload=memory.offload if memory else None,
            feed_forward_chunks=memory.feed_forward_chunks if memory else None,
        )
