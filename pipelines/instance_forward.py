"""Puts another ``forward`` in front of one module's own, and takes it away again.

Knows: how PyTorch, Diffusers and Accelerate find a module's forward. Does not know: what the other one does.
Hooks of the module stay outside of it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def replaced_forward(
    module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Within the block, calls of the module go to what ``make`` makes of its forward."""
    had_own = "forward" in vars(module)
    before = module.forward
    module.forward = make(before)
    try:
        yield
    finally:
        if had_own:
            module.forward = before
        else:
            del module.forward
