"""Puts a job's attention setting into the pipeline's transformers.

Knows: how a job's setting maps to a swap. Does not know: operators, or when calls run dense.
"""

from attention import SwapHandle, swap
from configs.job import JobFailedError, JobParameters
from pipelines.loading import LoadedPipeline


def swapped(loaded: LoadedPipeline, params: JobParameters) -> SwapHandle:
    """Swap the job's backend in; the handle, a context manager, takes it out again.

    Raises:
        JobFailedError: ``invalid_input`` for a setting that this model cannot run.
    """
    grid = loaded.preset.geometry.token_grid(params.width, params.height, params.num_frames)
    try:
        setting = params.attention.resolved(grid[1:])
        if setting.backend == "dense":
            return swap(loaded.pipe, "dense")
        block_size, anchor_stride = setting.block_size, setting.anchor_stride
        return swap(
            loaded.pipe,
            setting.backend,
            block_size=None if block_size == "auto" else block_size,
            anchor_stride=None if anchor_stride == "auto" else anchor_stride,
            anchor_offset=setting.anchor_offset,
            dense_layers=setting.dense_layers,
            min_tokens=setting.min_tokens,
        )
    except ValueError as error:
        raise JobFailedError("invalid_input", f"attention: {error}") from error
