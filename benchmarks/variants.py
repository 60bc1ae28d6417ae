"""What is compared: the stock pipeline, ours, and what is switched on in either.

A variant is written as words joined by ``+``. The first is ``stock`` (Diffusers' own code), ``dense`` (ours,
attention dense) or ``sparse`` (ours, anchor_local); the others are switches:

    compile   the repeated blocks are compiled: for stock by Diffusers' own method
    cudnn     stock only: attention prefers cuDNN's kernel to the one that PyTorch would take
    scores    stock only: attention that stores its scores (PyTorch's "math", in the dtype of the model)
    fp8       ours only: linear layers in fp8
    fp8attention  sparse only: sparse attention in 8 bits
    chunks    ours only: the feed-forward in ``--chunks`` slices of tokens, which needs less memory; jobs
              without it have as many slices as pay
    vae16     jobs of ours only: the VAE in float16 (``vae_dtype``) instead of float32
    encoder, model, group   offload levels; for stock, model is Diffusers' model offload

Knows: names and which go together. Does not know: torch.
"""

from dataclasses import dataclass
from typing import Literal

Offload = Literal["none", "encoder", "model", "group"]
STOCK_SWITCHES = ("compile", "cudnn", "scores", "model")
OUR_SWITCHES = ("compile", "fp8", "fp8attention", "chunks", "vae16", "encoder", "model", "group")
LEVELS: tuple[Offload, ...] = ("encoder", "model", "group")


@dataclass(frozen=True, slots=True)
class Variant:
    """One row of the table."""

    attention: Literal["stock", "dense", "sparse"]
    switches: frozenset[str] = frozenset()

    @property
    def ours(self) -> bool:
        """Whether our code runs it."""
        return self.attention != "stock"

    @property
    def offload(self) -> Offload:
        """The level switched on."""
        return next((level for level in LEVELS if level in self.switches), "none")

    def __str__(self) -> str:
        known = STOCK_SWITCHES if self.attention == "stock" else OUR_SWITCHES
        return "+".join([self.attention, *(switch for switch in known if switch in self.switches)])


def read_variant(text: str) -> Variant:
    """The variant of a name such as ``sparse+compile``.

    Raises:
        ValueError: an unknown word, or switches that do not go together; the message says which there are.
    """
    first, *rest = text.split("+")
    if first not in ("stock", "dense", "sparse"):
        raise ValueError(f"variant {text!r} begins with {first!r}; it must be stock, dense or sparse")
    known = STOCK_SWITCHES if first == "stock" else OUR_SWITCHES
    for switch in rest:
        if switch not in known:
            raise ValueError(f"variant {text!r}: {first} has no {switch!r}; it has {', '.join(known)}")
    if first == "dense" and "fp8attention" in rest:
        raise ValueError(f"variant {text!r}: dense attention has no fp8")
    if len(set(rest)) < len(rest):
        raise ValueError(f"variant {text!r} names a switch twice")
    for group in (LEVELS, ("cudnn", "scores")):
        if len(set(rest) & set(group)) > 1:
            raise ValueError(f"variant {text!r} may have only one of {', '.join(group)}")
    return Variant(first, frozenset(rest))  # type: ignore[arg-type]
