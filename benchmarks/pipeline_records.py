"""What the pipeline benchmark is asked and what it finds: the border between its processes.

Knows: numbers and their statistics. Does not know: torch, or how anything is measured.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from benchmarks.architectures import Architecture
from benchmarks.variants import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one process measures.

    Attributes:
        whole_job: whole jobs; otherwise single forward passes of the transformer.
        repeats: forward passes of a round; a round of jobs is one job.
        steps, dense_steps: of a job; how many steps run dense is only for ``sparse``.
        chunks: slices of the feed-forward where the variant has them.
    """

    architecture: Architecture
    variant: Variant
    device: str
    whole_job: bool
    repeats: int
    steps: int
    dense_steps: float
    chunks: int = 4
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What a process is, before anything is timed."""

    machine: Mapping[str, object]
    fingerprints: Mapping[str, int]
    weight_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class JobSeconds:
    """A whole job: all of it as the caller waits for it, and its stages."""

    total: float
    text_encode: float
    denoise: float
    vae_decode: float
    encode_mp4: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of a variant.

    Attributes:
        step_seconds: of forward passes, or of a job's steps.
        peak_bytes: by stage, weights included: device bytes, on a CPU the resident set.
        ran: attention and what was switched on beside it, in words.
        output: some values of the result, to compare variants by; none of a job.
    """

    step_seconds: tuple[float, ...]
    peak_bytes: Mapping[str, int]
    ran: str
    job: JobSeconds | None = None
    output: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """What is compared: a job as a whole, or the median step."""
        return self.job.total if self.job else statistics.median(self.step_seconds)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a variant has no numbers."""

    reason: str


class Bench(Protocol):
    """A variant, ready in a process of its own."""

    def facts(self) -> Facts:
        """What it is."""

    def warm_up(self) -> None:
        """Do everything once that only the first time costs."""

    def measure(self) -> Round:
        """One round."""
