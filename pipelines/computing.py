"""How one job's transformer passes are computed, and what is told of it.

Knows: which ways there are, and which of them a job takes. Does not know: how each is done (``compiling``,
``guidance``, ``step_cache``, ``fp8``), or samplers.
"""

import contextlib
from collections.abc import Iterator

from configs.compute import ComputeReport, GuidanceRan
from configs.job import JobParameters
from pipelines.fused.choice import runs_fused
from pipelines.guidance import batched_guidance, batches_guidance
from pipelines.loading import LoadedPipeline
from pipelines.step_cache import PassCounts, step_cached
from pipelines.text import EncodedText, uses_guidance


class Computing:
    """Of one attempt at a job."""

    def __init__(self, loaded: LoadedPipeline, params: JobParameters) -> None:
        self._loaded = loaded
        self._params = params
        self._guidance = self._choose_guidance()
        self._counts = PassCounts()

    @contextlib.contextmanager
    def within(self, text: EncodedText) -> Iterator[None]:
        """Within the block, the transformers compute as the job does."""
        loaded = self._loaded
        last_blocks = loaded.family.last_blocks(loaded.pipe)
        with contextlib.ExitStack() as stack:
            caches = step_cached(loaded.transformers, last_blocks, self._params.step_cache)
            self._counts = stack.enter_context(caches)
            if self._guidance == "batched" and text.negative is not None:
                stack.enter_context(batched_guidance(loaded.transformers, text.negative))
            yield

    def report(self) -> ComputeReport:
        """What ran so far."""
        blocks = self._loaded.blocks
        return ComputeReport(
            compiled=blocks.are_compiled,
            eager_reason=blocks.eager_reason,
            fused=runs_fused(self._loaded.transformers),
            precision=self._loaded.compute.precision,
            guidance=self._guidance,
            step_cache=self._params.step_cache,
            passes=self._counts.passes,
            cached_passes=self._counts.cached,
        )

    def warnings(self, steps_before: int) -> list[str]:
        """What the job's owner should know, of a job that began after so many steps of an earlier attempt."""
        blocks, cache = self._loaded.blocks, self._params.step_cache
        said = []
        if blocks.have_failed:
            said.append(f"the transformer ran eager, which is slower: {blocks.eager_reason}")
        if cache != "off" and steps_before:
            said.append(
                f"step_cache {cache} began anew at step {steps_before + 1}, where this attempt went on: "
                "the clip may differ a little from one that was made without a break"
            )
        return said

    def _choose_guidance(self) -> GuidanceRan:
        loaded, params = self._loaded, self._params
        if not uses_guidance(params):
            return "none"
        if loaded.parallel is not None:
            return "split" if loaded.parallel.partners(params) else "separate"
        frames, rows, columns = loaded.preset.geometry.token_grid(
            params.width, params.height, params.num_frames
        )
        mode = loaded.compute.guidance_batching
        return "batched" if batches_guidance(mode, frames * rows * columns, loaded.device) else "separate"
