"""What torch reads from the environment when it starts; to be set before anything imports it.

Knows: the variables. Does not know: torch.
"""

import os

# Torch 2.11 to 2.13 read both, the older name with a warning.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"


def set_up_torch_environment() -> None:
    """The allocator and the folder of compiled code, unless the operator has chosen them."""
    _let_segments_grow()
    if not os.environ.get(_COMPILED):
        # Torch's own default is below /tmp, which many systems empty when they start.
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        os.environ[_COMPILED] = os.path.join(cache, "reelwright", "inductor")


def _let_segments_grow() -> None:
    """Have CUDA memory in segments that grow, unless the allocator is set up already.

    Jobs of different sizes follow each other, weights come and go between their stages, and a decode wants a
    few large pieces after a denoise of many small ones: with fixed segments each size leaves holes that no
    other fits into.
    """
    if not any(os.environ.get(name) for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
