"""How networks are computed: what a server or a request may choose, and what really ran.

Knows: the names of the choices. Does not know: how any of them is done, or models.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

CompileMode = Literal["auto", "on", "off"]
ModelPrecision = Literal["full", "fp8"]
FusedMode = Literal["auto", "on", "off"]
VaeDtype = Literal["auto", "float32", "float16", "bfloat16"]
GuidanceBatching = Literal["auto", "on", "off"]
GuidanceRan = Literal["none", "batched", "separate", "split"]
StepCache = Literal["off", "first_block", "taylor_seer"]


class ComputeSettings(BaseModel):
    """Choices that hold for all jobs of a loaded model.

    Attributes:
        compile: of the transformer's repeated blocks; ``auto`` compiles on a GPU, and runs eager, with a
            warning, where that fails. ``on`` fails instead.
        fused: norms, residuals and rotary embedding of these blocks, and norms and residuals of the VAE's
            decoder, in kernels of our own; ``auto`` on a GPU where they are known. ``on`` fails where either
            is not known; a CPU runs the same in PyTorch.
        precision: of the linear layers in these blocks; ``full`` is the loaded number format.
        guidance_batching: both passes of classifier-free guidance as one batch; ``auto`` decides by length.
        vae_dtype: number format of the VAE; ``auto`` is float32 on a GPU, elsewhere what ``dtype`` says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    compile: CompileMode = "auto"
    fused: FusedMode = "auto"
    precision: ModelPrecision = "full"
    guidance_batching: GuidanceBatching = "auto"
    vae_dtype: VaeDtype = "auto"


def fuses_decoder(mode: FusedMode, *, is_gpu: bool) -> bool:
    """Whether a VAE's decoder is to run fused, if it is one that can."""
    return mode == "on" or (mode == "auto" and is_gpu)


AUTO = ComputeSettings()
EAGER = ComputeSettings(compile="off")


class ComputeReport(BaseModel):
    """How a job's transformer passes were computed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compiled: bool = Field(description="Whether the repeated blocks ran compiled.")
    eager_reason: str | None = Field(description="Why they did not; null if they did.")
    fused: bool = Field(
        default=False, description="Whether norms, residuals and rotary embedding in them ran fused."
    )
    precision: ModelPrecision
    guidance: GuidanceRan = Field(
        description="Classifier-free guidance: not used, both passes in one batch, one after the other, or "
        "each on half of the ranks."
    )
    step_cache: StepCache
    passes: int = Field(description="Forward passes of the transformer in this attempt.")
    cached_passes: int = Field(description="Those of them that the step cache answered.")
