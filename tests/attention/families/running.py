"""Runs a variant: as it is, or with an explicit mask in the stock model's self-attention."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.attention.families.variants import BATCH, GRID, Grid, Variant, tokens

EXACT = 1e-11
# Mochi's norms are float32 in a float64 model, too: where a value lies between two of them, 1e-16 decides.
ROUNDED = 1e-6
STOCK_ATTENTION = functional.scaled_dot_product_attention


def built(variant: Variant) -> Any:
    """The same weights every time, float64; biases and tables that start at zero are not zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = variant.build()
        for parameter in model.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().double()


def arguments(variant: Variant, grid: Grid = GRID, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    said = variant.arguments(grid, torch.Generator().manual_seed(1))
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in said.items()
    }


def run(model: Any, variant: Variant, grid: Grid = GRID) -> Tensor:
    """One forward pass of a classifier-free-guidance batch of two."""
    out: Tensor = model(**arguments(variant, grid), return_dict=False)[0]
    return out


def joint_mask(variant: Variant, video: Tensor, text: int) -> Tensor:
    """The mask of a clip [tokens, tokens], with so many tokens of text that see all and are seen by all."""
    mask = torch.ones(text + video.shape[0], text + video.shape[0], dtype=torch.bool)
    clip = slice(text, None) if variant.text == "first" else slice(None, video.shape[0])
    mask[clip, clip] = video
    return mask


@contextmanager
def masked(variant: Variant, video: Tensor) -> Iterator[list[int]]:
    """Stock self-attention also obeys this mask; yields the number of such calls as a list's only entry."""
    lengths = {
        video.shape[0] + text for text in ((*variant.valid,) if variant.drops_padding else (variant.total,))
    }
    calls = [0]

    def attend(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        length = query.shape[2]
        if length == key.shape[2] and length in lengths:
            mask = joint_mask(variant, video, length - video.shape[0])
            attn_mask = mask if attn_mask is None else attn_mask & mask
            calls[0] += 1
        return STOCK_ATTENTION(query, key, value, attn_mask=attn_mask, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", attend)
        yield calls


def run_masked(model: Any, variant: Variant, video: Tensor, grid: Grid = GRID) -> Tensor:
    """The stock model with the mask."""
    with masked(variant, video) as calls:
        out = run(model, variant, grid)
    assert calls[0] == variant.layers * (BATCH if variant.drops_padding else 1)
    return out


def run_choosing(
    model: Any, variant: Variant, attend_entry: Callable[[Tensor, Tensor, Tensor, int], Tensor]
) -> Tensor:
    """The stock model with another self-attention, which gets one batch entry without its padding.

    ``attend_entry``: q, k, v [1, text and then the clip, heads, head_dim] and the number of text tokens.
    """
    video = tokens(GRID)
    lengths = {video + text for text in (variant.valid if variant.drops_padding else (variant.total,))}
    calls = [0]

    def attend(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        length = query.shape[2]
        if not (length == key.shape[2] and length in lengths):
            return STOCK_ATTENTION(query, key, value, **more)
        calls[0] += 1
        out = torch.zeros_like(query)
        for entry in range(query.shape[0]):
            text = length - video if variant.drops_padding else variant.valid[entry]
            positions = torch.arange(length)
            clip = positions[-video:] if variant.text == "first" else positions[:video]
            words = positions[:text] if variant.text == "first" else positions[video : video + text]
            both = torch.cat([words, clip])
            q, k, v = (x[entry : entry + 1, :, both].transpose(1, 2) for x in (query, key, value))
            out[entry, :, both] = attend_entry(q, k, v, text)[0].transpose(0, 1)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", attend)
        out = run(model, variant)
    assert calls[0] == variant.layers * (BATCH if variant.drops_padding else 1)
    return out


def expected_density(variant: Variant, video: Tensor) -> float:
    masks = [joint_mask(variant, video, valid) for valid in variant.valid]
    return sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


def assert_same(variant: Variant, out: Tensor, expected: Tensor) -> None:
    """Equal but for rounding in float64."""
    tolerance = ROUNDED if variant.name == "mochi" else EXACT
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
