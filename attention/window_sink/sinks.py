"""Per-head attention sinks: two published meanings, neither of which can stand in for the other."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

SinkMode = Literal["null_logit", "key0_bias"]


@dataclass(frozen=True, slots=True, eq=False)
class Sinks:
    """One finite logit per query head, and where it goes.

    Attributes:
        logits: float32 [heads], not scaled.
        mode: ``null_logit``: one more entry of the softmax that has no value, so that weights sum to less
            than one. ``key0_bias``: added to the scaled score of a sequence's key 0 wherever it is seen.
    """

    logits: Tensor
    mode: SinkMode
