"""Wan's video decoder with norms and activations written straight into what the next convolution reads.

Knows: Diffusers' Wan VAE, 2.1's and 2.2's, and its cache of past frames. Does not know: jobs, tiles, devices.
Convolutions run with channels last, in which cuDNN computes, and pad pictures themselves.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanCausalConv3d,
    WanDecoder3d,
    WanResample,
    WanResidualBlock,
    WanResidualUpBlock,
    WanRMS_norm,
    WanUpBlock,
)
from torch import Tensor, nn

from pipelines.fused.vae_norm import add_, norm_silu_, upsample
from pipelines.joined_attention import has_hooks

PAST = 2  # frames before its own that a causal convolution sees
FIRST_CHUNK = "Rep"  # Diffusers' mark of a convolution in time that has seen a first frame


def fuse_decoder(vae: nn.Module) -> int:
    """Have a Wan VAE's decoder run so; returns how many residual blocks it has, 0 if something is unusual."""
    if type(vae) is not AutoencoderKLWan:
        return 0
    decoder: Any = vae.decoder
    blocks = [each for each in decoder.modules() if type(each) is WanResidualBlock]
    if not (_is_usual_decoder(decoder) and all(map(_is_usual_block, blocks))):
        return 0
    for module in decoder.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)
        elif isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
        module.__class__ = FUSED.get(type(module), type(module))
    return len(blocks)


def part_decoder(vae: nn.Module) -> None:
    """Undo ``fuse_decoder``, but for the layout of weights."""
    for module in vae.modules():
        if isinstance(module, FUSED_MODULES):
            module.__class__ = module.stock


def runs_fused(vae: nn.Module) -> bool:
    """Whether its decoder is fused."""
    return any(isinstance(module, FusedDecoder) for module in vae.modules())


class FusedResidualBlock(WanResidualBlock):  # type: ignore[misc]  # Diffusers has no types
    """What a residual block is then."""

    stock = WanResidualBlock

    def forward(self, x: Tensor, feat_cache: Any = None, feat_idx: Any = (0,)) -> Tensor:
        """As of Diffusers' block. A convolution's bias is added where its result is read next."""
        past = feat_cache, feat_idx
        hidden = _convolved(self.conv1, _normed(self.norm1, x, None, *past), None, *past)
        buffer = _normed(self.norm2, hidden, self.conv1.bias, *past)
        del hidden
        out = _convolved(self.conv2, buffer, None, *past)
        del buffer
        # The shortcut comes last: until here it would only take room.
        shortcut = self.conv_shortcut
        if not isinstance(shortcut, nn.Identity):
            x = _channels_last(F.conv3d(x, shortcut.weight, shortcut.bias))
        add_(out, self.conv2.bias, x)
        return out


class FusedMiddleAttention(WanAttentionBlock):  # type: ignore[misc]
    """What attention between residual blocks is then: its result lies as they want it."""

    stock = WanAttentionBlock

    def forward(self, x: Tensor) -> Tensor:
        """As of Diffusers' module."""
        return _channels_last(super().forward(x))


class FusedResample(WanResample):  # type: ignore[misc]
    """What an upsampling is then: pictures stay in their number format, with channels last."""

    stock = WanResample

    def forward(self, x: Tensor, feat_cache: Any = None, feat_idx: Any = (0,)) -> Tensor:
        """As of Diffusers' module."""
        batch, frames = x.shape[0], 1
        if self.mode == "upsample3d" and feat_cache is not None:
            if feat_cache[feat_idx[0]] is None:  # the clip's first frame stays one
                feat_cache[feat_idx[0]] = FIRST_CHUNK
                feat_idx[0] += 1
            else:
                x, frames = self._pairs_of_frames(x, feat_cache, feat_idx), 2
        out: Tensor = self.resample[1](upsample(x, frames)).unflatten(0, (batch, -1)).transpose(1, 2)
        return out

    def _pairs_of_frames(self, x: Tensor, feat_cache: Any, feat_idx: Any) -> Tensor:
        """[batch, channels, time, height, width] -> the same with twice the channels, one frame's first."""
        buffer = _with_past(x, feat_cache, feat_idx)
        buffer[:, :, PAST:] = x
        return _convolved(self.time_conv, buffer, self.time_conv.bias, feat_cache, feat_idx)


class FusedDecoder(WanDecoder3d):  # type: ignore[misc]
    """What the decoder is then."""

    stock = WanDecoder3d

    def forward(
        self, x: Tensor, feat_cache: Any = None, feat_idx: Any = (0,), first_chunk: bool = False
    ) -> Tensor:
        """As of Diffusers' decoder."""
        past = feat_cache, feat_idx
        buffer = _with_past(x, *past)
        buffer[:, :, PAST:] = x
        x = _convolved(self.conv_in, buffer, self.conv_in.bias, *past)
        x = self.mid_block(x, *past)
        for block in self.up_blocks:
            shortcut = block.avg_shortcut if type(block) is WanResidualUpBlock else None
            kept = None if shortcut is None else x
            # Called one by one, so that nothing else holds what the first of them was given.
            for part in _parts(block):
                x = part(x, *past)
            if kept is not None:
                _add_duplicates(x, kept, shortcut, first_chunk)
            del kept
        buffer = _normed(self.norm_out, x, None, *past)
        del x
        return _convolved(self.conv_out, buffer, self.conv_out.bias, *past)


FUSED_MODULES = (FusedResidualBlock, FusedMiddleAttention, FusedResample, FusedDecoder)
FUSED: dict[type, type] = {each.stock: each for each in FUSED_MODULES}


def _channels_last(x: Tensor) -> Tensor:
    """The same values; of a single frame, cuDNN may give them another layout than was asked for."""
    return x.contiguous(memory_format=torch.channels_last_3d)


def _with_past(x: Tensor, feat_cache: Any, feat_idx: Any) -> Tensor:
    """What the convolution whose turn it is will read: its past frames, or zeros, and room for those of x."""
    batch, channels, frames, height, width = x.shape
    buffer = torch.empty(
        (batch, channels, PAST + frames, height, width),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last_3d,
    )
    past = None if feat_cache is None else feat_cache[feat_idx[0]]
    if isinstance(past, Tensor):
        buffer[:, :, :PAST] = past
    else:
        buffer[:, :, :PAST] = 0
    return buffer


def _normed(norm: Any, x: Tensor, shift: Tensor | None, feat_cache: Any, feat_idx: Any) -> Tensor:
    """The same with silu(norm(x + shift)) in that room."""
    buffer = _with_past(x, feat_cache, feat_idx)
    bias = norm.bias.flatten() if isinstance(norm.bias, Tensor) else None
    norm_silu_(buffer[:, :, PAST:], x, shift, norm.gamma.flatten(), bias)
    return buffer


def _convolved(conv: Any, buffer: Tensor, bias: Tensor | None, feat_cache: Any, feat_idx: Any) -> Tensor:
    """As many frames as were put behind the past ones; the last are kept for the next chunk."""
    if feat_cache is not None:
        feat_cache[feat_idx[0]] = buffer[:, :, -PAST:].clone()
        feat_idx[0] += 1
    width, _, height, *_ = conv._padding
    return F.conv3d(buffer, conv.weight, bias, padding=(0, height, width))


def _parts(block: Any) -> Iterator[Any]:
    """What a block of the decoder calls, one after the other."""
    yield from block.resnets
    if type(block) is WanUpBlock:
        yield from block.upsamplers or ()
    elif block.upsampler is not None:
        yield block.upsampler


def _add_duplicates(x: Tensor, kept: Tensor, shortcut: Any, first_chunk: bool) -> None:
    """x becomes x + shortcut(kept), whose values each stand for a box of x's; that is never made."""
    time, side, factor = shortcut.factor_t, shortcut.factor_s, shortcut.factor
    dropped = time - 1 if first_chunk else 0
    for place, (t, row, column) in enumerate(product(range(time), range(side), range(side))):
        source = kept[:, place // shortcut.repeats :: factor // shortcut.repeats]
        if t < dropped:
            source = source[:, :, 1:]
        x[:, :, (t - dropped) % time :: time, row::side, column::side] += source


def _is_usual_decoder(decoder: Any) -> bool:
    resamples = [each for each in decoder.modules() if type(each) is WanResample]
    return (
        type(decoder) is WanDecoder3d
        and all(map(_is_usual_part, decoder.up_blocks))
        and _is_norm(decoder.norm_out)
        and _is_silu(decoder.nonlinearity)
        and all(map(_is_causal, (decoder.conv_in, decoder.conv_out)))
        and all(map(_is_usual_resample, resamples))
    )


def _is_usual_part(block: Any) -> bool:
    """Whether a block of the decoder, which is not called, can be replaced by what it calls."""
    shortcut = getattr(block, "avg_shortcut", None)
    return (
        type(block) in (WanUpBlock, WanResidualUpBlock)
        and not has_hooks(block)
        and (shortcut is None or not (has_hooks(shortcut) or shortcut.factor % shortcut.repeats))
    )


def _is_usual_block(block: Any) -> bool:
    shortcut = block.conv_shortcut
    return (
        all(map(_is_norm, (block.norm1, block.norm2)))
        and _is_silu(block.nonlinearity)
        and all(map(_is_causal, (block.conv1, block.conv2)))
        and block.dropout.p == 0
        and not any(map(has_hooks, (block.dropout, shortcut)))
        and type(shortcut) in (nn.Identity, WanCausalConv3d)
    )


def _is_usual_resample(resample: Any) -> bool:
    convolutions = [resample.time_conv] if resample.mode == "upsample3d" else []
    return (
        resample.mode in ("upsample2d", "upsample3d")
        and all(map(_is_causal, convolutions))
        and not has_hooks(resample.resample[0])
        and not has_hooks(resample.resample)
    )


def _is_causal(conv: Any) -> bool:
    """Whether it is a convolution whose weights may be used without calling it."""
    return (
        type(conv) is WanCausalConv3d
        and conv.stride == (1, 1, 1)
        and conv._padding[4:] == (PAST, 0)
        and not has_hooks(conv)
    )


def _is_norm(norm: Any) -> bool:
    return type(norm) is WanRMS_norm and norm.channel_first and not has_hooks(norm)


def _is_silu(module: Any) -> bool:
    return type(module) is nn.SiLU and not has_hooks(module)
