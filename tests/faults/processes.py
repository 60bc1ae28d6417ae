"""Other processes, as Linux shows them: their state, children and memory; stopping them and limiting them.

Knows: /proc, signals and resource limits. Does not know: what the processes do.
"""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE_SECONDS = 90.0
SLICE_SECONDS = 0.004


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Poll until the condition holds; ``what`` says in the failure what was waited for."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, f"waited {seconds:g} s in vain until {what}"
        time.sleep(0.002)


def state(pid: int) -> str:
    """The letter that Linux gives it: R, S, D, T (stopped), Z; X: there is no such process."""
    return fields(pid)[0]


def fields(pid: int) -> list[str]:
    """/proc/PID/stat behind the name: state, parent, group, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0", "0"]


def command(pid: int) -> str:
    """The command line; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def children(pid: int) -> list[int]:
    """Living children."""
    every = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [child for child in every if fields(child)[1] == str(pid) and state(child) not in "ZX"]


def ffmpegs_of(pid: int) -> dict[int, str]:
    """The ffmpegs that a process has started and that have not ended, with their command lines."""
    commands = {child: command(child) for child in children(pid)}
    return {child: text for child, text in commands.items() if "ffmpeg" in text.partition(" ")[0]}


def started_ffmpeg(pid: int) -> int:
    """The one ffmpeg that a process has started; a moment after its start Linux shows no command line yet."""
    wait_until(lambda: len(ffmpegs_of(pid)) == 1, "one ffmpeg is seen")
    return next(iter(ffmpegs_of(pid)))


def ffmpeg_of(pid: int) -> int | None:
    """The ffmpeg that a process has started, if it runs."""
    return next(iter(ffmpegs_of(pid)), None)


def read_bytes(pid: int) -> int:
    """How much it has read, from files and pipes; 0 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/io").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def threads(pid: int) -> int:
    """How many threads it has."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def resident_bytes(pid: int) -> int:
    """Its resident set."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def address_space_bytes(pid: int) -> int:
    """All that it has mapped: what RLIMIT_AS limits."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it stands still."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state(pid) in "TX", f"process {pid} stands still", 10)


def go_on(pid: int) -> None:
    """SIGCONT, if there is such a process."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def kill(pid: int) -> None:
    """SIGKILL, and wait until it is dead, with all of its threads."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_dead(pid), f"process {pid} is dead", 10)


def is_dead(pid: int) -> bool:
    """Whether its parent can know of its end. The first thread is a zombie while others are still ending."""
    letter = state(pid)
    if letter != "Z":
        return letter == "X"
    with suppress(FileNotFoundError, ProcessLookupError):
        return threads(pid) <= 1
    return True


def run_in_slices(pid: int, until: Callable[[], bool], what: str) -> None:
    """Let a process run for a few milliseconds at a time until, while it stands, the condition holds.

    It is left standing. That is how a moment is caught that is over in less time than it takes to look.
    """
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    try:
        stop(pid)
        while not until():
            assert time.monotonic() < give_up_at, f"waited {PATIENCE_SECONDS:g} s in vain until {what}"
            go_on(pid)
            time.sleep(SLICE_SECONDS)
            stop(pid)
    except BaseException:
        go_on(pid)
        raise


@contextmanager
def limited(pid: int, limit: int, value: int) -> Iterator[None]:
    """Within the block, the process has that soft limit (``resource.RLIMIT_...``)."""
    before = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (value, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, limit, before)
