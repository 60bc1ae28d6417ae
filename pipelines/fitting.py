"""Fits a job into the memory that the device really has: chooses the offload level, and lowers it.

Knows: what the loaded networks weigh, what is free, and the arithmetic of configs/fit.py. Does not know: how
weights move, or what a stage computes.
"""

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from configs.fit import Fit, Room, choose, least, predict, what_would_fit
from configs.job import DecodeRung, JobFailedError, JobParameters, MemoryPlanned, MemoryReport, Stage
from configs.memory import ClipShape, OffloadLevel, most_chunks, resident_bytes, text_bytes
from pipelines.device_memory import available_bytes, in_use_meter, limit_memory, total_bytes
from pipelines.guidance import batches_guidance

if TYPE_CHECKING:
    from pipelines.loading import LoadedPipeline

_GIB = 2**30


class OffloadError(ValueError):
    """An offload level that the device does not have."""


class JobMemory:
    """The memory of one job: planned before it, looked at again before the denoise."""

    def __init__(
        self,
        loaded: "LoadedPipeline",
        params: JobParameters,
        emit: Callable[[MemoryPlanned], None],
        warn: Callable[[str], None],
    ) -> None:
        self._loaded = loaded
        self._clip = clip_shape(loaded, params)
        self._emit = emit
        self._warn = warn
        self._planned: OffloadLevel | None = None
        self._rung: DecodeRung = "whole"
        self.report = MemoryReport(
            offload=loaded.placement.level,
            feed_forward_chunks=1,
            available_bytes=0,
            predicted_peak_by_stage={},
        )

    def begin(self) -> None:
        """Choose how the job fits, and put the weights where that wants them.

        Raises:
            JobFailedError: ``out_of_memory`` if the clip would not fit into all of the device.
        """
        require_room(self._loaded, self._clip)
        self._take(self._choose(self._room()))

    def look_again(self) -> None:
        """Before the denoise: take a lower level if less is free than the job was planned with, and tell."""
        room = self._room()
        lower = room.levels[room.levels.index(self.report.offload) :]
        found = self._choose(Room(room.available_bytes, lower, room.decodes_on_cpu_too))
        if found.offload != self.report.offload:
            self._take(found)
        self._emit(MemoryPlanned(self.report))

    @property
    def can_lower(self) -> bool:
        """Whether there is a level that needs less."""
        return self.report.offload != self._room().levels[-1]

    def lower(self, reason: str) -> None:
        """After running out of memory, for this reason: take the next level, in as many slices as pay."""
        levels = self._room().levels
        level = levels[levels.index(self.report.offload) + 1]
        self._warn(f"offload {self.report.offload} ran out of memory, {level} was tried: {reason}")
        chunks = self._chunks() or most_chunks(self._loaded.memory, self._clip)
        self._take(predict(self._loaded.memory, self._clip, level, "whole", chunks=chunks))
        self._emit(MemoryPlanned(self.report))

    @property
    def first_rung(self) -> DecodeRung:
        """The way to decode that is tried first. A GPU says by itself what does not fit; a CPU would not."""
        return "whole" if self._loaded.device.type == "cuda" else self._rung

    def _choose(self, room: Room) -> Fit:
        memory, clip = self._loaded.memory, self._clip
        found = choose(memory, clip, room, chunks=self._chunks())
        if found is not None:
            return found
        found = least(memory, clip, room)
        self._warn(
            f"{found.peak_bytes / _GIB:.2f} GiB are predicted to be needed and "
            f"{room.available_bytes / _GIB:.2f} GiB are free; offload {found.offload} was tried all the same"
        )
        return found

    def _take(self, fit: Fit) -> None:
        loaded, available = self._loaded, self._room().available_bytes
        base = 0 if loaded.device.type == "cuda" else _besides_weights(loaded)
        peaks: dict[Stage, int] = {stage: peak + base for stage, peak in fit.peaks.items()}
        self._rung = fit.rung
        self._planned = self._planned or fit.offload
        self.report = MemoryReport(
            offload=fit.offload,
            lowered_from=self._planned if self._planned != fit.offload else None,
            feed_forward_chunks=fit.feed_forward_chunks,
            available_bytes=available + base,
            predicted_peak_by_stage=peaks,
        )
        beside = fit.peaks["denoise"] + loaded.memory.text_encoder.streamed + text_bytes(loaded.memory)
        loaded.placement.set_level(
            fit.offload,
            may_encode_ahead=fit.offload == "none" or beside <= available,
        )

    def _room(self) -> Room:
        return room_now(self._loaded)

    def _chunks(self) -> int | None:
        return self._loaded.memory_options.feed_forward_chunks


def clip_shape(loaded: "LoadedPipeline", params: JobParameters) -> ClipShape:
    """What of a job decides its memory."""
    tokens = prod(loaded.preset.geometry.token_grid(params.width, params.height, params.num_frames))
    both = params.guidance_scale > 1 and batches_guidance(
        loaded.compute.guidance_batching, tokens, loaded.device
    )
    return ClipShape(params.width, params.height, params.num_frames, batch=2 if both else 1)


def room_now(loaded: "LoadedPipeline") -> Room:
    """What weights and activations can take together now."""
    device, options = loaded.device, loaded.memory_options
    if device.type == "cuda":
        return Room.of(available_bytes(device, options.limit_bytes), is_gpu=True, choice=options.offload)
    # On a CPU the weights are held already; what else the process holds is not for the job.
    return Room.of(
        available_bytes(device, options.limit_bytes) + loaded.memory.weights_bytes,
        is_gpu=False,
        choice=options.offload,
    )


def place_weights(loaded: "LoadedPipeline") -> None:
    """Put the weights of a pipeline that was loaded on the host where jobs will want them.

    At ``auto`` that is the first level at which they fit; a job may need a lower one.

    Raises:
        OffloadError: a level was asked for that this device does not have.
    """
    device, options = loaded.device, loaded.memory_options
    if device.type != "cuda" and options.offload not in ("auto", "none"):
        raise OffloadError(
            f"offload={options.offload} takes weights from a GPU to the host, and the device is {device}; "
            "use auto or none"
        )
    if options.limit_bytes is not None:
        limit_memory(device, options.limit_bytes)
    room = room_now(loaded)
    fitting = (
        level
        for level in room.levels
        if max(resident_bytes(loaded.memory, level).values()) <= room.available_bytes
    )
    loaded.placement.set_level(next(fitting, room.levels[-1]))


def require_room(loaded: "LoadedPipeline", clip: ClipShape) -> None:
    """Raise JobFailedError if a clip is predicted not to fit into the whole device, however it is run."""
    device, memory = loaded.device, loaded.memory
    total = usable_bytes(loaded)
    is_gpu = device.type == "cuda"
    available = total if is_gpu else total - _besides_weights(loaded)
    room = Room.of(available, is_gpu=is_gpu, choice=loaded.memory_options.offload)
    needed = least(memory, clip, room)
    if needed.peak_bytes <= room.available_bytes:
        return
    others = " or ".join(describe(other) for other in what_would_fit(memory, clip, room))
    raise JobFailedError(
        "out_of_memory",
        f"{describe(clip)} would need {needed.peak_bytes / _GIB:.2f} GiB with offload {needed.offload}, "
        f"and {device} has {room.available_bytes / _GIB:.2f} GiB for it; "
        + (f"{others} would fit" if others else "nothing smaller would fit either"),
    )


def usable_bytes(loaded: "LoadedPipeline") -> int:
    """The device's memory, or the part of it that jobs may take."""
    total = total_bytes(loaded.device)
    return min(total, loaded.memory_options.limit_bytes or total)


def describe(clip: ClipShape) -> str:
    """``81 frames of 832x480``."""
    return f"{clip.num_frames} frames of {clip.width}x{clip.height}"


def _besides_weights(loaded: "LoadedPipeline") -> int:
    """Of a CPU process: libraries, and what earlier jobs left."""
    return max(0, in_use_meter(loaded.device)() - loaded.memory.weights_bytes)
