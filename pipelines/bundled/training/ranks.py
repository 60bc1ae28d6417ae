"""One process per device: who this process is, and how the processes add gradients and agree on the time.

Knows torch.distributed. Does not know models or losses.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among ``size`` equal ones, and the device it trains on."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def start(cls, device_type: str) -> "Ranks":
        """Join the group that torchrun describes in the environment; alone where it describes none."""
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if device_type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        else:
            device = torch.device(device_type)
        if size > 1:
            dist.init_process_group("nccl" if device_type == "cuda" else "gloo", rank=rank, world_size=size)
        return cls(rank, size, device)

    def stop(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> None:
        """Add ``values`` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)

    def first_says(self, value: float) -> float:
        """The value that rank 0 passes, on every rank."""
        if self.size == 1:
            return value
        said = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(said, src=0)
        return float(said.item())

    def gather(self, value: T) -> list[T]:
        """Everybody's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        gathered: list[T | None] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return [item for item in gathered if item is not None]


class Clock:
    """Wall-clock time since ``started`` (seconds of the epoch) as rank 0 sees it."""

    def __init__(self, ranks: Ranks, started: float) -> None:
        self._ranks = ranks
        self._started = started

    def seconds(self) -> float:
        """Seconds since the start, the same on every rank. A collective: every rank must call it."""
        return self._ranks.first_says(time.time() - self._started)


class Phase:
    """A stretch of training until ``until`` seconds on the clock, which it looks at every few steps."""

    LOOK_EVERY_STEPS = 5

    def __init__(self, clock: Clock, until: float) -> None:
        self._clock = clock
        self._until = until
        self._since = clock.seconds()
        self.step = 0
        self.now = self._since

    def __iter__(self) -> "Phase":
        return self

    def __next__(self) -> int:
        """The number of the next step, from 0, until the time is over."""
        if self.step % self.LOOK_EVERY_STEPS == 0:
            self.now = self._clock.seconds()
        if self.now >= self._until:
            raise StopIteration
        self.step += 1
        return self.step - 1

    @property
    def progress(self) -> float:
        """Share of the phase's time that has passed, in [0, 1]."""
        return (self.now - self._since) / (self._until - self._since)


class FlatGradients:
    """All gradients as views of one buffer: one all-reduce and one norm for any number of parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
        owned = list(parameters)
        self._ranks = ranks
        self._flat = torch.zeros(sum(p.numel() for p in owned), device=ranks.device)
        for parameter, view in zip(owned, self._flat.split([p.numel() for p in owned]), strict=True):
            parameter.grad = view.view_as(parameter)

    def zero(self) -> None:
        self._flat.zero_()

    def average_and_clip(self, max_norm: float) -> None:
        """Mean over the ranks, then scaled down to ``max_norm`` where it is larger."""
        self._ranks.sum(self._flat)
        self._flat /= self._ranks.size
        self._flat *= (max_norm / (self._flat.norm() + 1e-6)).clamp(max=1)
