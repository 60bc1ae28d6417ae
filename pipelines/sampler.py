"""The sampler's state between two denoise steps: taken out, and put back so that the pipeline goes on there.

Knows: Diffusers schedulers and how a pipeline's loop uses one. Does not know: jobs or files. Schedulers keep
earlier model outputs, so latents alone do not say how the next step goes.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# None, numbers, strings, tensors, and lists of these.
SamplerState = dict[str, Any]
# The configuration, which Diffusers keeps beside the state.
CONFIGURATION = "_internal_dict"


class UnknownStateError(Exception):
    """The scheduler keeps something that cannot be taken out; the message names it."""


def take_state(scheduler: Any) -> SamplerState:
    """Copy everything that the scheduler keeps."""
    if isinstance(scheduler, _Continued):
        scheduler = scheduler.continued
    return {name: _copy(name, value) for name, value in vars(scheduler).items() if name != CONFIGURATION}


def _copy(name: str, value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return [_copy(name, item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnknownStateError(f"the sampler's {name} is a {type(value).__name__}, which cannot be saved")


@contextlib.contextmanager
def continued(pipe: Any, step: int, state: SamplerState) -> Iterator[None]:
    """Within the block, the pipeline's loop begins after ``step`` steps, in that state."""
    scheduler = pipe.scheduler
    pipe.scheduler = _Continued(scheduler, step, state)
    try:
        yield
    finally:
        pipe.scheduler = scheduler


class _Continued:
    """Stands in for a scheduler whose first steps were made earlier.

    A loop sets the timesteps, reads them, sets the begin index and then steps. It reads only the timesteps
    that are left; the begin index brings back the state, with all of them: a scheduler counts from both ends.
    """

    def __init__(self, scheduler: Any, step: int, state: SamplerState) -> None:
        self.continued = scheduler
        self._first_step = step
        self._state = state
        self._has_begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.continued, name)

    @property
    def timesteps(self) -> torch.Tensor:
        timesteps: torch.Tensor = self.continued.timesteps
        return timesteps if self._has_begun else timesteps[self._first_step :]

    def set_begin_index(self, begin_index: int = 0) -> None:
        for name, value in self._state.items():
            setattr(self.continued, name, value)
        self._has_begun = True

    def step(self, *args: Any, **options: Any) -> Any:
        if not self._has_begun:
            raise RuntimeError("the pipeline's loop sets no begin index, so it cannot begin in the middle")
        return self.continued.step(*args, **options)
