"""Names of the objects of a job, below the store's prefix: ``videos/{job id}/{attempt}.{kind}``.

Knows: how a name is put together and taken apart. Does not know: stores. Every name holds the attempt, so
what a lost attempt writes late is never taken for another's.
"""

import re
from dataclasses import dataclass
from typing import Literal, Self

from server.job import JOB_ID_PATTERN

FOLDER = "videos"
Kind = Literal["video", "thumbnail", "spritesheet", "preview", "checkpoint"]
ENDINGS: dict[Kind, str] = {
    "video": ".mp4",
    "thumbnail": ".thumbnail.jpg",
    "spritesheet": ".spritesheet.jpg",
    "preview": ".preview.jpg",
    "checkpoint": ".checkpoint.safetensors",
}
CONTENT_TYPES: dict[Kind, str] = {
    "video": "video/mp4",
    "thumbnail": "image/jpeg",
    "spritesheet": "image/jpeg",
    "preview": "image/jpeg",
    "checkpoint": "application/octet-stream",
}
RESULT_KINDS: frozenset[Kind] = frozenset({"video", "thumbnail", "spritesheet"})
_KIND_OF = {ending: kind for kind, ending in ENDINGS.items()}
_NAME = re.compile(rf"{FOLDER}/({JOB_ID_PATTERN.strip('^$')})/(\d{{1,9}})(\..+)")


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """One object of one attempt."""

    job_id: str
    attempt: int
    kind: Kind

    def __str__(self) -> str:
        """The name in the store."""
        return f"{folder_of(self.job_id)}/{self.attempt}{ENDINGS[self.kind]}"

    @property
    def shown_name(self) -> str:
        """What a browser saves it as."""
        return f"{self.job_id}{ENDINGS[self.kind]}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The key with that name, or None: no job's."""
        match = _NAME.fullmatch(name)
        kind = _KIND_OF.get(match[3]) if match else None
        return cls(match[1], int(match[2]), kind) if match and kind else None


def folder_of(job_id: str) -> str:
    """What the names of a job's objects begin with, before a slash."""
    return f"{FOLDER}/{job_id}"
