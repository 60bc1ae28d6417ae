"""The manifest of a clip: everything needed to make it again. Written into the MP4 and served over HTTP."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from configs.job import AttentionReport, JobParameters, RunEnvironment


class Manifest(BaseModel):
    """What ran. ``parameters`` alone, with the same model, make the clip again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    object: Literal["video.manifest"] = "video.manifest"
    version: Literal[1] = 1
    parameters: JobParameters
    attention: AttentionReport
    environment: RunEnvironment

    @classmethod
    def of(cls, parameters: JobParameters, attention: AttentionReport, environment: RunEnvironment) -> Self:
        """Put the parts together."""
        return cls(parameters=parameters, attention=attention, environment=environment)
