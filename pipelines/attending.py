"""Puts a job's attention setting into the pipeline's transformers.

Knows: how a job's setting maps to a swap, and what ran. Does not know: operators, or when calls run dense.
"""

import dataclasses
import math
from collections import Counter
from typing import Literal, TypeVar

from attention import (
    AnchorLocalBackend,
    AnchorLocalPattern,
    Backend,
    BlockTopKBackend,
    BoxPattern,
    SwapHandle,
    TilePattern,
    WindowBackend,
    check_precision,
    swap,
)
from configs.attention import AttentionConfig
from configs.job import AttentionReport, JobFailedError, JobParameters, ParallelReport
from pipelines.loading import LoadedPipeline

Known = TypeVar("Known", int, tuple[int, int, int])


def swapped(loaded: LoadedPipeline, params: JobParameters) -> SwapHandle:
    """Swap the job's backend in; the handle, a context manager, takes it out again.

    Raises:
        JobFailedError: ``invalid_input`` for a setting that this model cannot run.
    """
    grid = loaded.preset.geometry.token_grid(params.width, params.height, params.num_frames)
    ranks = loaded.parallel.token_ranks(params) if loaded.parallel else None
    try:
        if ranks is not None and math.prod(grid) < ranks.size:
            raise ValueError(f"a clip of {math.prod(grid)} tokens cannot be shared by {ranks.size} ranks")
        if ranks is not None and params.step_cache != "off":
            raise ValueError(
                f"step_cache {params.step_cache} cannot be used where {ranks.size} ranks share a clip's "
                "tokens: each would decide by its own; set it to off"
            )
        setting = params.attention.resolved(grid)
        if setting.backend == "anchor_local":
            check_precision(setting.precision, "auto", loaded.device)
        if setting.backend == "dense":
            return swap(loaded.pipe, "dense", ranks=ranks)
        return swap(
            loaded.pipe,
            _backend(setting),
            dense_layers=setting.dense_layers,
            min_tokens=setting.min_tokens,
            ranks=ranks,
        )
    except ValueError as error:
        raise JobFailedError("invalid_input", f"attention: {error}") from error


def _backend(setting: AttentionConfig) -> Backend:
    """What a setting without ``auto`` says."""
    if setting.backend == "window":
        window = _known(setting.window)
        return WindowBackend((window, window), setting.window_unit, setting.global_frames)
    if setting.backend == "block_topk":
        return BlockTopKBackend(BoxPattern(*setting.boxes), setting.top_k, setting.pooled_rest)
    stride, offset = _known(setting.anchor_stride), setting.anchor_offset
    if setting.token_order == "tile":
        tiles = TilePattern(_known(setting.tile_thw), stride, offset)
        return AnchorLocalBackend(tiles, anchor_rotation=setting.anchor_rotation, precision=setting.precision)
    pattern = AnchorLocalPattern(_known(setting.block_size), stride, offset)
    return AnchorLocalBackend(
        pattern,
        block_unit=setting.block_unit,
        anchor_rotation=setting.anchor_rotation,
        precision=setting.precision,
    )


def _known(value: Known | Literal["auto", "none"]) -> Known:
    if isinstance(value, str):
        raise ValueError(f"a value is still {value}")
    return value


def attention_report(handle: SwapHandle, before: AttentionReport | None = None) -> AttentionReport:
    """What ran since the swap, and in the steps ``before`` it that an earlier attempt saved."""
    now = AttentionReport.model_validate(dataclasses.asdict(handle.report()))
    if before is None or not now.sparse_calls + now.dense_calls:
        return before or now
    sparse = now if now.sparse_calls else before
    return now.model_copy(
        update={
            "implementation": sparse.implementation,
            "dense_implementation": (now if now.dense_calls else before).dense_implementation,
            "density": sparse.density,
            "sparse_calls": now.sparse_calls + before.sparse_calls,
            "dense_calls": now.dense_calls + before.dense_calls,
            "dense_reasons": dict(Counter(before.dense_reasons) + Counter(now.dense_reasons)),
        }
    )


def parallel_report(
    loaded: LoadedPipeline, params: JobParameters, handle: SwapHandle
) -> ParallelReport | None:
    """How the ranks shared the work; None if there is one only."""
    group, shared = loaded.parallel, handle.parallel_report()
    if group is None:
        return None
    return ParallelReport(
        ranks=group.size,
        guidance=group.guidance(params),
        token_ranks=shared.ranks if shared else 1,
        sparse_exchange=shared.sparse_exchange if shared else None,
        sparse_call_bytes=shared.sparse_call_bytes if shared else 0,
        dense_call_bytes=shared.dense_call_bytes if shared else 0,
    )
