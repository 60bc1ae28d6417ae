"""What waits to be written while the database is away."""

from configs.job import PreviewReady, StepFinished
from server.claims import Claim
from server.inbox import Inbox, Word, WorkerDied
from server.protocol import JobProgressed
from server.storage.job_files import PreviewStored
from tests.server.samples import UNKNOWN_ID

FIRST, SECOND = Claim(UNKNOWN_ID, 1), Claim(UNKNOWN_ID, 2)


def preview(claim: Claim, step: int) -> JobProgressed:
    """A picture."""
    return JobProgressed(claim, PreviewReady(step, b"picture"))


def step(claim: Claim, number: int) -> JobProgressed:
    """A denoise step."""
    return JobProgressed(claim, StepFinished(number, 100, 0.5))


def all_of(inbox: Inbox) -> list[Word]:
    """Empty it."""
    found = []
    while inbox:
        found.append(inbox.first)
        inbox.drop_first()
    return found


def test_of_the_previews_of_an_attempt_the_newest_waits() -> None:
    inbox = Inbox()
    for number in range(1, 100):
        inbox.extend([step(FIRST, number), preview(FIRST, number), PreviewStored(FIRST, number)])
    assert len(inbox) == 99 + 2
    assert all_of(inbox)[-3:] == [step(FIRST, 99), preview(FIRST, 99), PreviewStored(FIRST, 99)]


def test_everything_else_waits_in_its_order() -> None:
    words: list[Word] = [step(FIRST, 1), preview(FIRST, 1), preview(SECOND, 1), WorkerDied("killed", None)]
    inbox = Inbox()
    inbox.extend(words)
    assert all_of(inbox) == words
    assert not inbox
