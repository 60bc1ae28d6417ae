"""The vae_decode stage: latents to frames, with less and less memory.

Knows: the rungs, from the whole picture on the device down to small tiles on the CPU, and what frees memory
between them. Does not know: how a family decodes or tiles, or how latents are made.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from configs.job import DecodeReport, DecodeRung, JobFailedError, JobParameters
from pipelines.convolution import convolved_by_onednn
from pipelines.failures import first_line, is_out_of_memory
from pipelines.frames import Frames, Leaving, require_clip
from pipelines.loading import LoadedPipeline
from pipelines.memory import release_memory
from pipelines.tile import Tile

Take = Callable[[Frames], None]
# Pixels; a quarter of each side is blended with the neighbour. 256 is what Diffusers' video VAEs start with.
TILE = Tile(side=256, stride=192)
SMALL_TILE = Tile(side=128, stride=96)
RANGE_HINT = "; float16 ends at 65504, vae_dtype=float32 has the range"


@dataclass(frozen=True)
class Rung:
    """One way to decode."""

    name: DecodeRung
    tile: Tile | None
    device: torch.device


def rungs(device: torch.device, width: int, height: int) -> list[Rung]:
    """The ways to decode that picture, the most hungry one first, without those that only repeat another."""
    tiled = (Rung("tiled", TILE, device), Rung("small_tiles", SMALL_TILE, device))
    ladder = [Rung("whole", None, device)]
    ladder += [rung for rung in tiled if rung.tile is not None and rung.tile.side < max(width, height)]
    if device.type != "cpu":
        ladder.append(Rung("cpu", SMALL_TILE, torch.device("cpu")))
    return ladder


def _untaken() -> Take:
    """Nobody wants frames before the last one is there."""
    return lambda frames: None


def decode(
    loaded: LoadedPipeline,
    params: JobParameters,
    latents: torch.Tensor,
    check_cancel: Callable[[], None],
    first: DecodeRung = "whole",
    begin: Callable[[], Take] = _untaken,
) -> tuple[Frames, DecodeReport]:
    """Frames [F, H, W, 3] by the first rung that memory is enough for; those before ``first`` are not tried.

    ``begin`` is called at the start of each rung and gives what takes its frames as they are decoded. Only
    the last rung's frames are a clip, and only if this returns.

    Raises:
        JobFailedError: ``out_of_memory`` if it is for none; ``bad_output`` for a clip that is no clip.
    """
    failures: dict[DecodeRung, str] = {}
    ladder = rungs(loaded.device, params.width, params.height)
    start = next((index for index, rung in enumerate(ladder) if rung.name == first), 0)
    for rung in ladder[start:]:
        frames = _try(loaded, params, latents, rung, check_cancel, begin(), failures)
        if frames is not None:
            return frames, DecodeReport(rung=rung.name, failed=tuple(failures), fused=loaded.decodes_fused)
        _clean_up(loaded)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
    raise JobFailedError(
        "out_of_memory",
        f"out of memory in vae_decode for {params.num_frames} frames of {params.width}x{params.height} "
        f"on {loaded.device}, however it was decoded ({reasons})",
    )


def _try(
    loaded: LoadedPipeline,
    params: JobParameters,
    latents: torch.Tensor,
    rung: Rung,
    check_cancel: Callable[[], None],
    take: Take,
    failures: dict[DecodeRung, str],
) -> Frames | None:
    """The frames, or None and a reason when memory ran out. The error, which holds tensors, ends in here."""
    try:
        with (
            loaded.family.tiled(loaded.pipe, rung.tile),
            loaded.placement.decoding(rung.device),
            convolved_by_onednn(rung.device),
        ):
            parts = []
            for part in _left(loaded.family.decoded_parts(loaded.pipe, latents), check_cancel):
                parts.append(part)
                take(part)
            frames = np.concatenate(parts)
            require_clip(frames, params.num_frames, params.height, params.width)
            return frames
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failures[rung.name] = first_line(error)
        return None


def _clean_up(loaded: LoadedPipeline) -> None:
    loaded.family.forget(loaded.pipe)
    gc.collect()
    release_memory(loaded.device)


def _left(parts: Iterable[torch.Tensor], check_cancel: Callable[[], None]) -> Iterator[Frames]:
    """Each part's frames. A device that works by itself begins with the next part's decode before that."""
    waiting: list[Leaving] = []
    for pictures in parts:
        hint = RANGE_HINT if pictures.dtype == torch.float16 else ""
        # Rounded on the device, so that a quarter of the bytes leave it.
        waiting.append(Leaving(pictures, hint=hint, before_frame=check_cancel))
        del pictures
        if len(waiting) > 1 or waiting[0].are_here:
            yield waiting.pop(0).frames()
    for rest in waiting:
        yield rest.frames()
