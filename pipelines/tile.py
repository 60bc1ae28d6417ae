"""The size of the tiles that a picture is decoded in. Knows nothing else."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Square tiles of ``side`` pixels, one every ``stride`` pixels; what they share is blended."""

    side: int
    stride: int
