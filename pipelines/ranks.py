"""One model on several devices of this host: this process is rank 0, and starts the others.

Knows: the followers' processes and pipes, and what it means when one is lost. Does not know: what they
compute, or queues and clients.
"""

import contextlib
import multiprocessing
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NoReturn

import torch

from attention import check_ranks
from configs.compute import AUTO, ComputeSettings
from configs.job import JobFailedError, JobParameters
from configs.memory import NO_MEMORY_OPTIONS, MemoryOptions
from configs.model_preset import ModelPreset
from pipelines.checkpoint import Checkpoint
from pipelines.follower import Answer, FollowerStart, run_follower
from pipelines.loading import LoadedPipeline, load_pipeline
from pipelines.parallel import OtherRankFailedError, ParallelGroup
from pipelines.rank_messages import Denoise, Ended, Loaded, NotLoaded, RankAlive, packed
from pipelines.text import EncodedText

BROKEN_EXIT_CODE = 70
# A transfer that waits longer for another rank is an error. The slowest step must take less.
TIMEOUT_SECONDS = 1800.0
# A follower that says nothing for so long hangs. While it loads, imports and weight readers may hold Python's
# lock for long.
SILENCE_SECONDS = 120.0
LOAD_SILENCE_SECONDS = 600.0
# A pause of the whole machine, in which nobody looked, hardly counts as silence.
LOOK_SECONDS = 1.0
# For a lost follower's last message, when a step fails here; and for our own error, when one fails there.
GRACE_SECONDS = 5.0
_SPAWN = multiprocessing.get_context("spawn")


def load_on_ranks(
    preset: ModelPreset,
    *,
    ranks: int,
    device: str = "auto",
    dtype: str = "auto",
    memory: MemoryOptions = NO_MEMORY_OPTIONS,
    compute: ComputeSettings = AUTO,
    on_broken: Callable[[str], None],
    prepare: Callable[[], None] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
) -> LoadedPipeline:
    """Load the model here and in ``ranks - 1`` new processes, for jobs that all of them denoise.

    Rank r uses the CUDA device r behind that of ``device``; on a CPU all share it. When a follower is lost in
    a way that this process cannot report as a job's error, or gives no sign of life for ``silence_seconds``,
    ``on_broken`` is called with the reason, from a thread, and then this process ends with exit code
    BROKEN_EXIT_CODE.

    Raises:
        JobFailedError: ``model_load_failed``: too few devices, a model that so many ranks cannot share, or a
            follower that could not load it.
    """
    loaded = load_pipeline(preset, device=device, dtype=dtype, memory=memory, compute=compute)
    if ranks == 1:
        return loaded
    try:
        devices = _devices(loaded.device, ranks)
        check_ranks(loaded.pipe, ranks)
    except ValueError as error:
        raise JobFailedError("model_load_failed", f"model {preset.name} on {ranks} ranks: {error}") from error
    meeting = Path(tempfile.mkdtemp(prefix="reelwright-ranks-")) / "meeting"  # of this user's processes only
    starts = [
        FollowerStart(
            preset=preset,
            rank=rank,
            size=ranks,
            device=name,
            dtype=str(loaded.dtype).removeprefix("torch."),
            memory=memory,
            compute=compute,
            meeting=str(meeting),
            timeout_seconds=timeout_seconds,
            prepare=prepare,
        )
        for rank, name in enumerate(devices)
        if rank > 0
    ]
    started = Ranks(starts, meeting.parent, on_broken, silence_seconds)
    try:
        started.wait_until_loaded()
        group = ParallelGroup(0, ranks, str(meeting), loaded.device, timeout_seconds)
    except BaseException:
        started.close()
        raise
    started.watch()
    # A copy would have another placement; no one else has seen this one yet.
    object.__setattr__(loaded, "parallel", group)
    object.__setattr__(loaded, "ranks", started)
    return loaded


def _devices(first: torch.device, ranks: int) -> list[str]:
    """Raises ValueError if there are not so many."""
    if first.type != "cuda":
        return [first.type] * ranks
    begin, found = first.index or 0, torch.cuda.device_count()
    if begin + ranks > found:
        raise ValueError(f"{ranks} GPUs are needed from {first} on, and torch sees {found}")
    return [f"cuda:{begin + rank}" for rank in range(ranks)]


class Ranks:
    """The followers, as rank 0 holds them.

    Attributes:
        broken: why there will be no more jobs on these ranks; None: there may be. To be asked after each job.
        peaks: peak memory of ranks 1, 2, ... in the last denoise that all ended in order, in bytes.
    """

    def __init__(
        self,
        starts: list[FollowerStart],
        folder: Path,
        on_broken: Callable[[str], None],
        silence_seconds: float,
    ) -> None:
        """``folder``: where the ranks meet, removed in the end: groups meet when they are first used."""
        self.size = len(starts) + 1
        self.broken: str | None = None
        self.peaks: tuple[int, ...] = ()
        self._devices = [start.device for start in starts]
        self._memory_in_use: dict[int, int] = {}
        self._silence_seconds = silence_seconds
        self._silent = dict.fromkeys(range(1, self.size), 0.0)
        self._folder = folder
        self._on_broken = on_broken
        self._is_closing = False
        self._ended: queue.Queue[tuple[int, Ended]] = queue.Queue()
        self._lost = threading.Event()
        self._loss: tuple[int, JobFailedError] | None = None
        self._has_left = threading.Event()  # this rank is not in a denoise
        self._has_left.set()
        self._pipes: list[Connection[Denoise, Answer]] = []
        self._processes = []
        for start in starts:
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(
                target=run_follower, args=(start, theirs), name=f"reelwright-rank-{start.rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        # Followers ignore SIGTERM, so an end of this process that only sent them that would wait for ever.
        self._at_exit = Finalize(self, self.close, exitpriority=10)

    @property
    def pids(self) -> list[int | None]:
        """Of the followers' processes."""
        return [process.pid for process in self._processes]

    def memory_in_use(self) -> list[tuple[str, int]]:
        """Each follower's device, and the bytes in use there (of its process on a CPU) when last heard."""
        return [(self._devices[rank - 1], found) for rank, found in sorted(self._memory_in_use.items())]

    def wait_until_loaded(self) -> None:
        """Raise JobFailedError if a follower has no model."""
        for rank, pipe in enumerate(self._pipes, start=1):
            answer = _first_word(pipe)
            if isinstance(answer, NotLoaded):
                raise JobFailedError("model_load_failed", f"rank {rank}: {answer.message}")
            if not isinstance(answer, Loaded):
                raise RuntimeError(f"rank {rank} said {answer} before it had loaded the model")

    def watch(self) -> None:
        """Listen to the followers from now on, in a thread."""
        threading.Thread(target=self._watch, name="ranks-watch", daemon=True).start()

    @contextlib.contextmanager
    def mirrored(
        self, group: ParallelGroup, params: JobParameters, text: EncodedText, resume: Checkpoint | None
    ) -> Iterator[None]:
        """Within the block, the followers denoise this job, too; behind it they have left it.

        Raises:
            JobFailedError: a follower's error, or that these ranks are broken.
        """
        if self.broken is not None:
            raise JobFailedError("internal", f"the ranks are broken: {self.broken}", retryable=True)
        group.has_stopped_together = False
        self.peaks = ()
        self._has_left.clear()
        message = Denoise(params, packed(text, resume))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a dead one is seen by the watch
                pipe.send(message)
        try:
            with group.agreed():
                """All are ready, or none begins."""
            yield
        except BaseException as error:
            if not group.has_stopped_together:
                self._break(error)
            self._collect(error)
            raise
        self._collect(None)

    def close(self) -> None:
        """End the followers."""
        self._is_closing = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(GRACE_SECONDS)
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _collect(self, error: BaseException | None) -> None:
        """Wait until all followers have left; raise the error of one that explains ours, or that we lack."""
        failures, peaks = [], dict[int, int]()
        for _ in self._pipes:
            rank, ended = self._ended.get()
            peaks[rank] = ended.peak_memory_bytes
            if ended.error is not None:
                failures.append(JobFailedError(ended.error.code, f"rank {rank}: {ended.error.message}"))
        self.peaks = tuple(peak for _, peak in sorted(peaks.items()))
        self._has_left.set()
        if failures and (error is None or isinstance(error, OtherRankFailedError)):
            raise failures[0] from None

    def _break(self, error: BaseException) -> NoReturn:
        """After an error in the middle of a step: end the followers, who may wait there for this rank."""
        is_lost = self._lost.wait(GRACE_SECONDS)
        if is_lost and self._loss is None:
            threading.Event().wait()  # one died; the watch is about to end this process
        self._has_left.set()
        self.broken = f"{type(error).__name__}: {error}"
        self.close()
        if self._loss is not None:
            rank, failure = self._loss
            self.broken = failure.message
            raise JobFailedError(failure.code, f"rank {rank}: {failure.message}") from None
        raise error

    def _watch(self) -> None:
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes, start=1)}
        with contextlib.suppress(OSError, ValueError):  # closed by ``close``
            while ranks:
                looked_at = time.monotonic()
                for pipe in wait(list(ranks), LOOK_SECONDS):
                    self._hear(ranks, pipe)  # type: ignore[arg-type]  # only connections were waited for
                self._look(min(time.monotonic() - looked_at, 2 * LOOK_SECONDS))

    def _look(self, seconds: float) -> None:
        """So long nobody spoke but those whose silence is 0."""
        for rank, before in self._silent.items():
            self._silent[rank] = before + seconds
            if self._silent[rank] > self._silence_seconds:
                self._end_process(f"rank {rank} gave no sign of life for {self._silent[rank]:.0f} seconds")

    def _hear(
        self, ranks: "dict[Connection[Denoise, Answer], int]", pipe: "Connection[Denoise, Answer]"
    ) -> None:
        rank = ranks[pipe]
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionResetError):  # reset: it died with messages unread
            del ranks[pipe]
            if not self._is_closing and self._loss is None:
                self._lost.set()
                self._end_process(f"rank {rank} died")
            return
        self._silent[rank] = 0.0
        if isinstance(answer, RankAlive) and answer.memory_in_use_bytes is not None:
            self._memory_in_use[rank] = answer.memory_in_use_bytes
        if not isinstance(answer, Ended):
            return
        if not answer.is_lost or answer.error is None:
            self._ended.put((rank, answer))
            return
        self._loss = rank, answer.error
        self._lost.set()
        if not self._has_left.wait(2 * GRACE_SECONDS):
            self._end_process(f"rank {rank}: {answer.error.message}")

    def _end_process(self, reason: str) -> None:
        """This rank may hang in a transfer for ever, so nothing less will do."""
        if self._is_closing:
            return
        self.broken = reason
        try:
            self._on_broken(reason)
        finally:
            for process in self._processes:
                process.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(BROKEN_EXIT_CODE)


def _first_word(pipe: "Connection[Denoise, Answer]") -> Answer:
    """What a follower says beside its signs of life."""
    try:
        while pipe.poll(LOAD_SILENCE_SECONDS):
            answer = pipe.recv()
            if not isinstance(answer, RankAlive):
                return answer
    except EOFError:
        return NotLoaded("its process ended while it loaded the model")
    return NotLoaded(
        f"it gave no sign of life for {LOAD_SILENCE_SECONDS:g} seconds while it loaded the model"
    )
