"""What a clip costs, in units that scale: tokens, passes through the transformer, and attended token pairs.

Knows: the arithmetic. Does not know: seconds or bytes (server/estimates.py).
"""

from dataclasses import dataclass
from math import prod

from attention.block_topk.boxes import BoxPattern
from attention.pattern import density
from attention.tiles import tile_density
from attention.window_sink.window import Window
from configs.attention import AttentionConfig
from configs.job import AttentionReport, JobParameters
from configs.model_preset import ModelPreset


@dataclass(frozen=True, slots=True)
class ClipCost:
    """``density`` is the attended share of token pairs over all self-attention calls of the job."""

    tokens: int
    passes: int
    density: float
    sparse_density: float


def clip_cost(parameters: JobParameters, preset: ModelPreset) -> ClipCost:
    """The cost of a clip that has not run."""
    grid = preset.geometry.token_grid(parameters.width, parameters.height, parameters.num_frames)
    tokens = prod(grid)
    sparse = _sparse_density(parameters.attention, grid)
    share = _sparse_share(parameters, preset)
    return ClipCost(tokens, transformer_passes(parameters), share * sparse + 1.0 - share, sparse)


def transformer_passes(parameters: JobParameters) -> int:
    """Passes per denoise step: classifier-free guidance runs the clip twice."""
    return 2 if parameters.guidance_scale > 1.0 else 1


def attended_share(report: AttentionReport) -> float:
    """The attended share of token pairs over all calls of a job that has run, dense ones included."""
    calls = report.sparse_calls + report.dense_calls
    return (report.sparse_calls * report.density + report.dense_calls) / calls if calls else 1.0


def _sparse_density(attention: AttentionConfig, grid: tuple[int, int, int]) -> float:
    """Of a sparse call; 1 where none is sparse."""
    tokens, frame_tokens = prod(grid), grid[1] * grid[2]
    if attention.backend == "dense" or tokens < attention.min_tokens:
        return 1.0
    unresolved = "the attention of a job is resolved before it is estimated"
    if attention.backend == "window":
        if attention.window == "auto":
            raise ValueError(unresolved)
        sides = (attention.window, attention.window)
        window = Window.of_clip(sides, attention.window_unit, attention.global_frames, frame_tokens)
        return window.allowed_pairs(tokens) / tokens**2
    if attention.backend == "block_topk":
        return BoxPattern(*attention.boxes).boxes(grid).expected_pairs(attention.top_k) / tokens**2
    if isinstance(attention.anchor_stride, str):
        raise ValueError(unresolved)
    if attention.token_order == "tile":
        if attention.tile_thw == "auto":
            raise ValueError(unresolved)
        return tile_density(grid, attention.tile_thw, attention.anchor_stride, attention.anchor_offset)
    if attention.block_size == "auto" or attention.block_unit != "tokens":
        raise ValueError(unresolved)
    return density(tokens, attention.block_size, attention.anchor_stride, attention.anchor_offset)


def _sparse_share(parameters: JobParameters, preset: ModelPreset) -> float:
    """Share of the self-attention calls that are not dense by order of dense_steps or dense_layers."""
    attention, steps = parameters.attention, parameters.num_inference_steps
    sparse_steps = 1.0 - attention.dense_step_count(steps) / steps
    if preset.num_layers is None:
        return sparse_steps
    return sparse_steps * (1.0 - len(set(attention.dense_layers)) / preset.num_layers)
