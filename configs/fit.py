"""Whether a clip fits into a device's memory, and how: which weights leave it, and how pictures are decoded.

Knows: the arithmetic of choosing. Does not know: where the numbers come from (configs/memory.py), devices, or
how anything is moved.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from configs.job import DecodeRung
from configs.memory import (
    DEVICE_STAGES,
    OFFLOAD_LEVELS,
    TILE_SIDES,
    ClipShape,
    DeviceRung,
    DeviceStage,
    ModelMemory,
    OffloadChoice,
    OffloadLevel,
    decode_bytes,
    denoise_bytes,
    most_chunks,
    resident_bytes,
    shorter_clip,
    smaller_clip,
    text_bytes,
)

# What CUDA's libraries take for themselves, and holes between tensors.
GPU_RESERVE_BYTES = 512 * 2**20
# What activations of each stage needed, over what the formula says; absent: just that.
Factors = Mapping[DeviceStage, float]
NO_FACTORS: Factors = {}


@dataclass(frozen=True, slots=True)
class Room:
    """What a device offers: bytes for weights and activations together, and the levels that it knows."""

    available_bytes: int
    levels: tuple[OffloadLevel, ...]
    decodes_on_cpu_too: bool

    @classmethod
    def of(cls, available_bytes: int, *, is_gpu: bool, choice: OffloadChoice = "auto") -> "Room":
        """Of a GPU, whose weights can go to the host; or of a CPU, where they are there already."""
        if not is_gpu:
            only: OffloadLevel = "none" if choice == "auto" else choice
            return cls(available_bytes, (only,), decodes_on_cpu_too=False)
        levels = OFFLOAD_LEVELS if choice == "auto" else (choice,)
        return cls(max(0, available_bytes - GPU_RESERVE_BYTES), levels, decodes_on_cpu_too=True)


@dataclass(frozen=True, slots=True)
class Fit:
    """How a clip fits: its offload level, the first way to decode that fits, and peak bytes by stage."""

    offload: OffloadLevel
    rung: DecodeRung
    feed_forward_chunks: int
    peaks: dict[DeviceStage, int]

    @property
    def peak_bytes(self) -> int:
        """Of the whole job."""
        return max(self.peaks.values())


def predict(
    memory: ModelMemory,
    clip: ClipShape,
    level: OffloadLevel,
    rung: DecodeRung,
    *,
    chunks: int | None = None,
    factors: Factors = NO_FACTORS,
) -> Fit:
    """Peak bytes of a clip by stage, weights included.

    ``chunks``: slices of the feed-forward; None: the fewest with which the denoise needs no more than another
    stage by the formula, or as many as pay.
    """
    weights = resident_bytes(memory, level)
    if rung == "cpu":
        weights["vae_decode"] -= memory.vae.total
    text = text_bytes(memory)
    decode = 0 if rung == "cpu" else decode_bytes(memory, clip, rung)
    if chunks is None:
        others = max(weights["text_encode"] + text, weights["vae_decode"] + decode)
        chunks = _fewest_chunks(memory, clip, others - weights["denoise"])
    activations: dict[DeviceStage, int] = {
        "text_encode": text,
        "denoise": denoise_bytes(memory, clip, chunks),
        "vae_decode": decode,
    }
    peaks = {
        stage: weights[stage] + round(activations[stage] * factors.get(stage, 1.0)) for stage in DEVICE_STAGES
    }
    return Fit(level, rung, chunks, peaks)


def _fewest_chunks(memory: ModelMemory, clip: ClipShape, room_bytes: int) -> int:
    """Slices of the feed-forward (a power of two) with which a pass takes no more, or as many as pay."""
    most, chunks = most_chunks(memory, clip), 1
    while chunks < most and denoise_bytes(memory, clip, chunks) > room_bytes:
        chunks *= 2
    return chunks


def rungs_of(clip: ClipShape) -> list[DeviceRung]:
    """The ways to decode on the device that are not just another one's, the fastest first."""
    longest = max(clip.width, clip.height)
    return ["whole", *(rung for rung, side in TILE_SIDES.items() if side < longest)]


def _rungs(clip: ClipShape, room: Room) -> list[DecodeRung]:
    rungs: list[DecodeRung] = [*rungs_of(clip)]
    return [*rungs, "cpu"] if room.decodes_on_cpu_too else rungs


def choose(memory: ModelMemory, clip: ClipShape, room: Room, *, chunks: int | None = None) -> Fit | None:
    """The fastest way in which the clip fits, or None.

    Weights are moved once a job, tiles cost more than that: a lower level comes before smaller tiles, except
    for ``group``, which moves all weights in each pass.
    """
    cheap = [level for level in room.levels if level != "group"]
    dear = [level for level in room.levels if level == "group"]
    for levels in (cheap, dear):
        for rung in _rungs(clip, room):
            for level in levels:
                found = predict(memory, clip, level, rung, chunks=chunks)
                if found.peak_bytes <= room.available_bytes:
                    return found
    return None


def least(memory: ModelMemory, clip: ClipShape, room: Room) -> Fit:
    """The way that needs the least memory, whether it fits or not."""
    ways = (predict(memory, clip, level, rung) for level in room.levels for rung in _rungs(clip, room))
    return min(ways, key=lambda way: way.peak_bytes)


def what_would_fit(memory: ModelMemory, clip: ClipShape, room: Room) -> list[ClipShape]:
    """The longest clip of the same size that fits, and the largest of the same length, if there are any."""

    def fits(other: ClipShape) -> bool:
        return choose(memory, other, room) is not None

    frames = clip.num_frames // memory.geometry.vae_temporal
    rows = clip.height // memory.geometry.side_multiple
    shorter = partial(shorter_clip, memory, clip)
    smaller = partial(smaller_clip, memory, clip)
    # Counts of latent frames after the first, and of the least height.
    length = bisect_left(range(frames), True, key=lambda count: not fits(shorter(count))) - 1
    height = bisect_left(range(1, rows), True, key=lambda count: not fits(smaller(count)))
    return [*([shorter(length)] if length >= 0 else []), *([smaller(height)] if height >= 1 else [])]
