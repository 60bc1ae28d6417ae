"""What worker and store have said and nobody has written down yet: it waits while the database is away.

Knows: the order, and which words make earlier ones superfluous. Does not know: what is written.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from configs.job import PreviewReady
from server.claims import Claim
from server.protocol import JobMessage, JobProgressed
from server.running_job import RunningJob
from server.storage.job_files import PreviewStored, StorageMessage


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """After all that the worker has said. ``guilty``: the job because of which it was killed."""

    cause: str
    guilty: RunningJob | None


Word = JobMessage | StorageMessage | WorkerDied


class Inbox:
    """Words in the order in which they were said. Of a job's previews only the newest waits: each is a
    picture, and an outage may last for hours."""

    def __init__(self) -> None:
        self._words: deque[Word] = deque()

    def __bool__(self) -> bool:
        return bool(self._words)

    def __len__(self) -> int:
        return len(self._words)

    @property
    def first(self) -> Word:
        """The next one to be written. It stays until ``drop_first``."""
        return self._words[0]

    def drop_first(self) -> None:
        """It is written."""
        self._words.popleft()

    def add(self, word: Word) -> None:
        """Something more was said."""
        preview = _preview_of(word)
        if preview is not None:
            self._words = deque(each for each in self._words if _preview_of(each) != preview)
        self._words.append(word)

    def extend(self, words: Iterable[Word]) -> None:
        """Several words."""
        for word in words:
            self.add(word)


def _preview_of(word: Word) -> tuple[str, Claim] | None:
    """The kind of preview and the attempt that it is of; None: it is about something else."""
    match word:
        case JobProgressed(claim=claim, event=PreviewReady()):
            return "made", claim
        case PreviewStored(claim=claim):
            return "stored", claim
        case _:
            return None
