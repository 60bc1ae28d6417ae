"""Whether a clip has room on the worker's device, before anything is queued.

Knows: what the worker said of its device, the model's files, and what recent jobs measured. Does not know:
the formulas (configs/memory.py), or torch. Where the model's files or the worker's device are not known yet,
nothing is refused: the worker looks again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from configs.compute import ComputeSettings, fuses_decoder
from configs.fit import Factors, Fit, Room, choose, least, predict, what_would_fit
from configs.job import JobParameters, MemoryReport, Stage
from configs.memory import DEVICE_STAGES, ClipShape, DeviceStage, MemoryOptions, ModelMemory, resident_bytes
from configs.model_files import ModelFilesError, memory_of_files
from configs.model_preset import ModelPreset
from server.job import Job
from server.workers import Worker

_GIB = 2**30
# Resident memory of a worker on a CPU beside weights and a job: Python, torch, Diffusers, transformers.
CPU_LIBRARIES_BYTES = 500 * 2**20
_BYTES_OF_DTYPE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Capacity:
    """A clip on the worker's device. ``fit``: how it fits, else what needs least; ``error``: the largest
    relative error of the formula in recent jobs of the model, None without any."""

    fit: Fit
    fits: bool
    room: Room
    would_fit: tuple[ClipShape, ...]
    error: float | None


def capacity(
    preset: ModelPreset,
    options: MemoryOptions,
    compute: ComputeSettings,
    worker: Worker | None,
    recent: Iterable[Job],
    parameters: JobParameters,
) -> Capacity | None:
    """Predict a clip; None while the model's files or the worker's device are not known.

    ``recent``: completed jobs of the model, which the formula is compared with.
    """
    if worker is None or worker.memory_total_bytes is None or worker.device is None:
        return None
    memory = _memory(preset, compute, worker)
    if memory is None:
        return None
    clip = ClipShape(parameters.width, parameters.height, parameters.num_frames)
    room = _room(options, worker)
    jobs = _measured(recent)
    chunks = options.feed_forward_chunks
    found = choose(memory, clip, room, chunks=chunks)
    fit = found or least(memory, clip, room)
    return Capacity(
        fit=predict(memory, clip, fit.offload, fit.rung, chunks=chunks, factors=_factors(memory, clip, jobs)),
        fits=found is not None,
        room=room,
        would_fit=() if found else tuple(what_would_fit(memory, clip, room)),
        error=max((job.error for job in jobs), default=None),
    )


def what_is_missing(found: Capacity, parameters: JobParameters) -> str:
    """The sentence on a clip that does not fit, and on what would."""
    asked = ClipShape(parameters.width, parameters.height, parameters.num_frames)
    others = " or ".join(_described(clip) for clip in found.would_fit)
    return (
        f"{_described(asked)} would need {found.fit.peak_bytes / _GIB:.2f} GiB with offload "
        f"{found.fit.offload}, and the device has {found.room.available_bytes / _GIB:.2f} GiB for it; "
        + (f"{others} would fit" if others else "no smaller clip would fit either")
    )


def _described(clip: ClipShape) -> str:
    return f"{clip.num_frames} frames of {clip.width}x{clip.height}"


def _memory(preset: ModelPreset, compute: ComputeSettings, worker: Worker) -> ModelMemory | None:
    size = _BYTES_OF_DTYPE.get(worker.dtype or "")
    if size is None:
        return None
    # On a GPU the VAE that nothing is said of is in float32 whatever the transformer is in.
    vae_size = _BYTES_OF_DTYPE.get(compute.vae_dtype, 4 if _is_gpu(worker) else size)
    fuses_wan_vae = fuses_decoder(compute.fused, is_gpu=_is_gpu(worker))
    try:
        return _memory_of_files(preset, size, vae_size, fuses_wan_vae)
    except ModelFilesError:
        return None


# A model's files do not change while it is served.
@lru_cache(maxsize=4)
def _memory_of_files(
    preset: ModelPreset, dtype_bytes: int, vae_dtype_bytes: int, fuses_wan_vae: bool
) -> ModelMemory:
    return memory_of_files(preset, dtype_bytes, vae_dtype_bytes, fuses_wan_vae=fuses_wan_vae)


def _is_gpu(worker: Worker) -> bool:
    return (worker.device or "").startswith("cuda")


def _room(options: MemoryOptions, worker: Worker) -> Room:
    is_gpu, total = _is_gpu(worker), worker.memory_total_bytes or 0
    available = total if is_gpu else total - CPU_LIBRARIES_BYTES
    return Room.of(available, is_gpu=is_gpu, choice=options.offload)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A recent job that says what was predicted and what was measured, by stage."""

    clip: ClipShape
    report: MemoryReport
    peaks: dict[Stage, int]

    @property
    def error(self) -> float:
        """Of the predicted peak, relative to the measured one."""
        predicted, measured = max(self.report.predicted_peak_by_stage.values()), max(self.peaks.values())
        return abs(predicted - measured) / measured


def _measured(jobs: Iterable[Job]) -> list[_Measured]:
    """Those of them that ran every stage, and decoded whole pictures, as was predicted."""
    found = []
    for job in jobs:
        result, asked = job.result, job.parameters
        if result is None or result.memory is None or result.decode is None or result.decode.rung != "whole":
            continue
        peaks = result.metrics.peak_memory_by_stage
        if set(peaks) >= set(DEVICE_STAGES) <= set(result.memory.predicted_peak_by_stage):
            clip = ClipShape(asked.width, asked.height, asked.num_frames)
            found.append(_Measured(clip, result.memory, peaks))
    return found


def _factors(memory: ModelMemory, clip: ClipShape, jobs: Sequence[_Measured]) -> Factors:
    """By how much the activations of the nearest recent job differed from the formula, stage by stage."""
    if not jobs:
        return {}
    size = clip.pixels * clip.num_frames
    nearest = min(jobs, key=lambda job: abs(job.clip.pixels * job.clip.num_frames - size))
    report = nearest.report
    formula = predict(memory, nearest.clip, report.offload, "whole", chunks=report.feed_forward_chunks)
    weights = resident_bytes(memory, report.offload)
    factors: dict[DeviceStage, float] = {}
    for stage in DEVICE_STAGES:
        activations = formula.peaks[stage] - weights[stage]
        rest = report.predicted_peak_by_stage[stage] - activations
        factors[stage] = max(0.0, nearest.peaks[stage] - rest) / activations
    return factors
