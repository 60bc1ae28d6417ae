"""Diffusers' caches over denoise steps: a pass may reuse what an earlier one computed. Never exact.

Knows: which of them are offered, with which settings, and how to count what they answered. Does not know:
jobs. A cache lives as long as one attempt's denoise: what a job or an earlier attempt left is never read.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig
from torch import nn

from configs.compute import StepCache
from pipelines.instance_forward import replaced_forward

# Diffusers' defaults, except that Taylor factors are kept of the output only (lite), not of every layer, and
# that two steps in three are predicted, not four in five: clips of few steps are common here.
CONFIGS: dict[StepCache, Callable[[], object]] = {
    "first_block": lambda: FirstBlockCacheConfig(threshold=0.05),
    "taylor_seer": lambda: TaylorSeerCacheConfig(
        cache_interval=3, disable_cache_before_step=3, max_order=1, use_lite_mode=True
    ),
}


@dataclass
class PassCounts:
    """Forward passes since the denoise began, and those that went through the last block."""

    passes: int = 0
    computed: int = 0

    @property
    def cached(self) -> int:
        """Passes that the cache answered."""
        return self.passes - self.computed


@contextlib.contextmanager
def step_cached(
    transformers: Sequence[Any], last_blocks: Sequence[nn.Module], name: StepCache
) -> Iterator[PassCounts]:
    """Within the block, these transformers cache; each starts and ends without a memory of other blocks."""
    counts = PassCounts()
    with contextlib.ExitStack() as stack:
        for block in last_blocks:
            # Before the cache, whose hooks then stand outside.
            stack.enter_context(replaced_forward(block, lambda forward: _counted(forward, counts)))
        for transformer in transformers:
            hook = transformer.register_forward_pre_hook(lambda module, inputs: _begin(counts))
            stack.callback(hook.remove)
            if name != "off":
                transformer.enable_cache(CONFIGS[name]())
                stack.callback(transformer.disable_cache)
        yield counts


def _begin(counts: PassCounts) -> None:
    counts.passes += 1


def _counted(forward: Callable[..., Any], counts: PassCounts) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts.computed += 1
        return forward(*args, **kwargs)

    return call
