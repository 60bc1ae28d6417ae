"""What moved between ranks."""

from dataclasses import dataclass
from typing import Literal

Exchange = Literal["anchors", "heads"]


@dataclass(frozen=True, slots=True)
class ParallelReport:
    """How the tokens of each forward pass were shared.

    Attributes:
        ranks: that shared them.
        sparse_exchange: what sparse calls exchange: ``anchors``, or ``heads`` (Ulysses); dense ones: heads.
        sparse_call_bytes: that one rank receives from others in a sparse call, on the average; 0: none was.
        dense_call_bytes: the same of a dense call.
    """

    ranks: int
    sparse_exchange: Exchange | None
    sparse_call_bytes: int
    dense_call_bytes: int
