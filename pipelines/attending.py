"""Puts a job's attention setting into the pipeline's transformers.

Knows: how a job's setting maps to a swap, and what ran. Does not know: operators, or when calls run dense.
"""

import dataclasses
from collections import Counter

from attention import SwapHandle, swap
from configs.job import AttentionReport, JobFailedError, JobParameters
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


def attention_report(handle: SwapHandle, before: AttentionReport | None = None) -> AttentionReport:
    """What ran since the swap, and in the steps ``before`` it that an earlier attempt saved."""
    now = AttentionReport.model_validate(dataclasses.asdict(handle.report()))
    if before is None or not now.sparse_calls + now.dense_calls:
        return before or now
    sparse = now if now.sparse_calls else before
    return now.model_copy(
        update={
            "implementation": sparse.implementation,
            "density": sparse.density,
            "sparse_calls": now.sparse_calls + before.sparse_calls,
            "dense_calls": now.dense_calls + before.dense_calls,
            "dense_reasons": dict(Counter(before.dense_reasons) + Counter(now.dense_reasons)),
        }
    )
