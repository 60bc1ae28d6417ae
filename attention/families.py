"""Where self-attention sits in the transformers that can be swapped. One row a model class."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class TransformerFamily:
    """Module paths of one Diffusers transformer class.

    Attributes:
        self_attention: regular expression of the names of the self-attention modules.
        patch_embedding: module that makes the token sequence; its output is [B, C, time, height, width].
        rotary: module that returns the rotary tables, each [1, tokens, 1, head_dim].
        output_projection: last per-token module, [B, tokens, C] in and out.
    """

    self_attention: str
    patch_embedding: str
    rotary: str
    output_projection: str


FAMILIES = {
    "WanTransformer3DModel": TransformerFamily(
        self_attention=r"blocks\.\d+\.attn1",
        patch_embedding="patch_embedding",
        rotary="rope",
        output_projection="proj_out",
    ),
}


def family_of(transformer: nn.Module) -> TransformerFamily:
    """The row of this model. Raises ValueError naming the class and the known ones."""
    name = type(transformer).__name__
    if name not in FAMILIES:
        raise ValueError(f"cannot swap attention in {name}; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def self_attention_modules(transformer: nn.Module, family: TransformerFamily) -> dict[str, Any]:
    """Self-attention modules by name, in layer order."""
    pattern = re.compile(family.self_attention)
    found = {name: module for name, module in transformer.named_modules() if pattern.fullmatch(name)}
    if not found:
        raise ValueError(f"{type(transformer).__name__} has no module {family.self_attention}")
    return found
