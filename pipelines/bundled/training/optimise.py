"""Learning-rate schedule and moving average of weights, the same for every stage.

Knows parameters and progress. Does not know what is trained.
"""

import copy
import math
from collections.abc import Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def adamw(
    parameters: Iterable[nn.Parameter], *, weight_decay: float, device: torch.device
) -> torch.optim.AdamW:
    """AdamW whose rate is set anew at each step by `set_learning_rate`."""
    return torch.optim.AdamW(
        parameters, lr=0.0, betas=(0.9, 0.98), weight_decay=weight_decay, fused=device.type == "cuda"
    )


def set_learning_rate(
    optimiser: torch.optim.Optimizer, peak: float, *, step: int, warmup_steps: int, progress: float
) -> None:
    """Linear warm-up over ``warmup_steps``; half a cosine over ``progress`` in [0, 1] to 2% of ``peak``."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    for group in optimiser.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / warmup_steps) * cosine


class MovingAverage(Generic[M]):
    """Exponential moving average of a module's weights, kept as a module of its own (``module``)."""

    def __init__(self, live: M, decay: float) -> None:
        self.module: M = copy.deepcopy(live).eval().requires_grad_(False)
        self._decay = decay
        self._averaged: list[Tensor] = list(self.module.parameters())
        self._live: list[Tensor] = [parameter.detach() for parameter in live.parameters()]
        self._updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Step towards the live weights; early steps go faster, so that the start is soon forgotten."""
        self._updates += 1
        decay = min(self._decay, (1 + self._updates) / (10 + self._updates))
        torch._foreach_lerp_(self._averaged, self._live, 1 - decay)
