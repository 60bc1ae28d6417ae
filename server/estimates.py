"""When a job will be done and what it will need, from what earlier jobs measured.

Knows: what jobs of the same shape took, how far this one is, and how cost scales with a clip. Does not know:
anything that was not measured or scaled from a measurement; then it says None.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression
from typing import Literal

from configs.job import JobParameters
from configs.model_preset import ModelPreset
from server.capacity import Capacity
from server.clip_cost import ClipCost, clip_cost
from server.job import Job, shape_key
from server.jobs import JobTable, MeasuredShape

_AFTER_DENOISE = frozenset({"vae_decode", "encode_mp4", "store"})


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a clip will take. ``basis``: jobs of its exact shape, or another shape of the model, scaled; None
    where none has run, and what is known of memory is by formula.

    ``fits``: whether the predicted peak is within the device's memory. None: not known.
    """

    seconds: float | None
    peak_memory_bytes: int | None
    basis: Literal["measured", "scaled"] | None
    fits: bool | None


def estimate(
    jobs: JobTable,
    preset: ModelPreset,
    parameters: JobParameters,
    memory_total_bytes: int | None,
    capacity: Capacity | None = None,
) -> Estimate:
    """Predict a clip on an idle worker with its model loaded; ``memory_total_bytes`` is the device's.

    ``capacity`` says what a clip needs of which no other length has run.
    """
    shapes = jobs.measured_shapes(parameters.model)
    if not shapes:
        if capacity is None:
            return Estimate(None, None, None, None)
        return Estimate(None, capacity.fit.peak_bytes, None, capacity.fits)
    key, steps = shape_key(parameters), parameters.num_inference_steps
    exact = next((shape for shape in shapes if shape.shape == key), None)
    if exact is not None:
        seconds = steps * exact.step_seconds + exact.other_seconds
        peak: int | None = exact.peak_memory_bytes
    else:
        cost = clip_cost(parameters, preset)
        seconds = _scaled_seconds(min(shapes, key=lambda shape: _distance(shape, cost)), cost, steps)
        peak = capacity.fit.peak_bytes if capacity else _fitted_peak(shapes, cost.tokens)
    fits = None if peak is None or memory_total_bytes is None else peak <= memory_total_bytes
    if exact is None and capacity is not None:
        fits = capacity.fits
    return Estimate(seconds, peak, "measured" if exact else "scaled", fits)


def remaining_seconds(jobs: JobTable, job: Job) -> float | None:
    """Seconds until a running job ends."""
    timing = jobs.timing(job.shape)
    if timing is None:
        return _from_its_own_steps(job)
    denoise = _steps_left(job) * timing.step_seconds
    if job.stage not in _AFTER_DENOISE or job.started_at is None:
        return denoise + timing.other_seconds
    elapsed = max(0.0, time.time() - job.started_at - job.denoise_seconds)
    return max(0.0, timing.other_seconds - elapsed)


def _steps_left(job: Job) -> int:
    """Denoise steps that this attempt still has to run."""
    return job.total_steps - max(job.step, job.checkpoint_step)


def _from_its_own_steps(job: Job) -> float | None:
    if job.steps_run == 0 or job.stage in _AFTER_DENOISE:
        return None
    return _steps_left(job) * job.denoise_seconds / job.steps_run


def _scaled_seconds(shape: MeasuredShape, cost: ClipCost, steps: int) -> float:
    """Half of the measured step is taken for attention (it grows with the attended pairs), half for
    everything else (it grows with the tokens); the rest of a job grows with the tokens."""
    tokens = cost.tokens / shape.tokens
    pairs = tokens**2 * cost.density / shape.density
    step_seconds = shape.step_seconds * cost.passes / shape.passes * (tokens + pairs) / 2
    return steps * step_seconds + shape.other_seconds * tokens


def _distance(shape: MeasuredShape, cost: ClipCost) -> tuple[float, float]:
    """How far apart two clips are: in length, and where that is equal in the work of their steps."""
    work = cost.passes * cost.density / (shape.passes * shape.density)
    return abs(math.log(cost.tokens / shape.tokens)), abs(math.log(work))


def _fitted_peak(shapes: Sequence[MeasuredShape], tokens: int) -> int | None:
    """Weights plus so many bytes per token, fitted; None below two lengths, or if either is negative."""
    if len({shape.tokens for shape in shapes}) < 2:
        return None
    slope, intercept = linear_regression(
        [shape.tokens for shape in shapes], [shape.peak_memory_bytes for shape in shapes]
    )
    return round(intercept + slope * tokens) if slope >= 0 and intercept >= 0 else None
