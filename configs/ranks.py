"""What several GPUs cannot denoise together, as far as a clip's parameters decide it.

Knows: parameters. Does not know: models (whether heads divide is found when one is loaded), or how ranks
share the work (pipelines/parallel.py; docs/parallel.md has the reasons).
"""

from configs.job import JobParameters
from configs.resolve import RequestError


def token_ranks(guidance_scale: float, gpus: int) -> int:
    """How many ranks share the tokens of a pass; an even number of them splits the passes of guidance."""
    return gpus // 2 if guidance_scale > 1 and gpus % 2 == 0 else gpus


def check_ranks_can_share(params: JobParameters, gpus: int) -> None:
    """Raise RequestError, naming the field, unless so many GPUs can denoise this clip together."""
    sharing = token_ranks(params.guidance_scale, gpus)
    if sharing == 1:
        return
    attention = params.attention
    on_ranks = f"where {sharing} GPUs share a clip's tokens"
    if attention.backend == "block_topk":
        raise RequestError(
            "attention.backend",
            f"attention.backend block_topk cannot run {on_ranks}; take anchor_local, window or dense",
        )
    if attention.backend == "anchor_local" and attention.precision != "full":
        raise RequestError(
            "attention.precision",
            f"attention.precision {attention.precision} cannot run {on_ranks}; take full",
        )
    if params.step_cache != "off":
        raise RequestError("step_cache", f"step_cache {params.step_cache} cannot run {on_ranks}; take off")
