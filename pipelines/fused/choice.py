"""Which transformers and VAEs run fused.

Knows: the setting, devices and number formats. Does not know: blocks, which are those of ``wan``, or
decoders, which are those of ``wan_vae``.
"""

from collections.abc import Sequence

import torch
from torch import nn

from configs.compute import FusedMode, fuses_decoder
from pipelines.fused.wan import FusedBlock, fuse_blocks
from pipelines.fused.wan_vae import fuse_decoder

_SHORT = (torch.bfloat16, torch.float16)


class FusedError(ValueError):
    """The blocks, or the decoder, are none that can be fused, and the setting is to fail then."""


def fuse(transformers: Sequence[nn.Module], device: torch.device, dtype: torch.dtype, mode: FusedMode) -> int:
    """Fuse the blocks of these transformers, of this dtype and for this device, as the mode says; how many.

    Raises:
        FusedError: ``on``, but a transformer has no blocks that can be.
    """
    if mode == "off" or (mode == "auto" and (device.type != "cuda" or dtype not in _SHORT)):
        return 0
    counts = [fuse_blocks(transformer) for transformer in transformers]
    if mode == "on" and not all(counts):
        names = ", ".join(sorted({type(transformer).__name__ for transformer in transformers}))
        raise FusedError(f"fused=on, but the blocks of {names} are none that can be fused")
    return sum(counts)


def fuse_vae(vae: nn.Module, device: torch.device, mode: FusedMode) -> int:
    """Fuse the decoder of this VAE, for this device, as the mode says; how many residual blocks it has.

    Raises:
        FusedError: ``on``, but the decoder cannot be.
    """
    if not fuses_decoder(mode, is_gpu=device.type == "cuda"):
        return 0
    count = fuse_decoder(vae)
    if mode == "on" and not count:
        raise FusedError(f"fused=on, but the decoder of {type(vae).__name__} is none that can be fused")
    return count


def runs_fused(transformers: Sequence[nn.Module]) -> bool:
    """Whether blocks of these are fused."""
    return any(isinstance(module, FusedBlock) for each in transformers for module in each.modules())
