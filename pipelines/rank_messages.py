"""What rank 0 and its followers say to each other over their pipes. No tensors but as bytes."""

import io
from dataclasses import dataclass

import torch

from configs.job import JobFailedError, JobParameters
from pipelines.checkpoint import Checkpoint
from pipelines.text import EncodedText

ALIVE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class RankAlive:
    """Every ``ALIVE_SECONDS`` from the follower's start. Memory in use: None before its model is loaded."""

    memory_in_use_bytes: int | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The follower has its model and can meet the others."""


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """It has not, and ends."""

    message: str


@dataclass(frozen=True, slots=True)
class Denoise:
    """Take part in this job's denoise. ``start``: what ``packed`` made of its text and checkpoint."""

    params: JobParameters
    start: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The follower has left the denoise.

    Attributes:
        error: its own; None: it has none.
        is_lost: it left in the middle of a step, where the others may wait for it, and its process ends.
        peak_memory_bytes: of its part of the denoise.
    """

    error: JobFailedError | None = None
    is_lost: bool = False
    peak_memory_bytes: int = 0


def packed(text: EncodedText, resume: Checkpoint | None) -> bytes:
    """Both as bytes, wherever their tensors are."""
    buffer = io.BytesIO()
    torch.save((text, resume), buffer)
    return buffer.getvalue()


def unpacked(start: bytes, device: torch.device) -> tuple[EncodedText, Checkpoint | None]:
    """What was packed on a device of the same kind; tensors that were on the host stay there."""

    places = {f"cuda:{index}": str(device) for index in range(torch.cuda.device_count())}
    # From a process of our own, so that it may hold more than weights.
    found: tuple[EncodedText, Checkpoint | None] = torch.load(
        io.BytesIO(start), map_location=places, weights_only=False
    )
    return found
