"""Stopping a job from inside the networks.

Knows: a cancel flag and module hooks. Does not know: what the modules compute. A step of a large model takes
a minute, so the flag is looked at before every transformer block and every decoded latent frame too.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from configs.job import JobCancelledError

# Blocks that the host may launch ahead of the GPU: enough to keep it fed, few enough to stop it soon.
LAUNCH_AHEAD = 2


class CancelFlag:
    """Set by the caller's ``is_cancelled`` or by ``set``; ``check`` may be called from any thread."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        self._is_cancelled = is_cancelled
        self._set = threading.Event()

    def set(self) -> None:
        """Cancel, whatever ``is_cancelled`` says."""
        self._set.set()

    def check(self) -> None:
        """Raise JobCancelledError when cancelled."""
        if self._set.is_set() or self._is_cancelled():
            raise JobCancelledError


@contextlib.contextmanager
def checked_inside(modules: Sequence[nn.Module], device: torch.device, flag: CancelFlag) -> Iterator[None]:
    """Within the block, look at the flag before every call of these modules by the thread of the block.

    Calls from other threads are no part of the job: a text encoded ahead for the next one.
    """
    owner = threading.get_ident()
    pace = _CudaPace(device) if device.type == "cuda" else None

    def before_call(module: nn.Module, inputs: tuple[object, ...]) -> None:
        if threading.get_ident() != owner:
            return
        if pace is not None:
            pace.wait()
        flag.check()

    hooks = [module.register_forward_pre_hook(before_call) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _CudaPace:
    """Holds the host back until the GPU is at most LAUNCH_AHEAD calls behind; else a whole step is queued."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._launched: deque[torch.cuda.Event] = deque()

    def wait(self) -> None:
        self._launched.append(self._stream.record_event())
        if len(self._launched) > LAUNCH_AHEAD:
            self._launched.popleft().synchronize()
