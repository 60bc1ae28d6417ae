"""The process of a rank other than 0: a model of its own that takes part in the denoise of rank 0's jobs.

Knows: rank 0's messages. Does not know: jobs beyond their denoise; texts, checkpoints and files are rank 0's.
It ends when its pipe does, so when rank 0's process does, even in the middle of a step.
"""

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from configs.compute import ComputeSettings
from configs.job import JobCancelledError, JobFailedError
from configs.memory import MemoryOptions
from configs.model_preset import ModelPreset
from pipelines.cancel import CancelFlag
from pipelines.device_memory import in_use_meter
from pipelines.failures import ended_by
from pipelines.loading import LoadedPipeline, load_pipeline
from pipelines.making import Making
from pipelines.memory import peak_meter
from pipelines.parallel import OtherRankFailedError, ParallelGroup
from pipelines.rank_messages import ALIVE_SECONDS, Denoise, Ended, Loaded, NotLoaded, RankAlive, unpacked
from pipelines.stages import StageRecorder

LOST_EXIT_CODE = 71
# To end in order, once rank 0 is gone.
EXIT_GRACE_SECONDS = 3.0
Answer = RankAlive | Loaded | NotLoaded | Ended


@dataclass(frozen=True, slots=True)
class FollowerStart:
    """What a follower is started with. ``prepare`` is called first, to set up logging, say."""

    preset: ModelPreset
    rank: int
    size: int
    device: str
    dtype: str
    memory: MemoryOptions
    compute: ComputeSettings
    meeting: str
    timeout_seconds: float
    prepare: Callable[[], None] | None


def run_follower(start: FollowerStart, pipe: "Connection[Answer, Denoise]") -> None:
    """Entry point of the process; returns when rank 0 closes the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):  # these reach all processes of a service; rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    jobs: queue.Queue[Denoise | None] = queue.Queue()
    answers = _Answers(pipe)
    threading.Thread(target=_read, args=(pipe, jobs), name="rank-0", daemon=True).start()
    threading.Thread(target=answers.beat, name="rank-alive", daemon=True).start()
    if start.prepare is not None:
        start.prepare()
    loaded = _load(start, answers)
    if loaded is None:
        return
    while (job := jobs.get()) is not None:
        ended = _take_part(loaded, job)
        answers.send(ended)
        if ended.is_lost:
            os._exit(LOST_EXIT_CODE)  # without a word to the group, whose transfers may hang


class _Answers:
    """The way to rank 0; any thread may send."""

    def __init__(self, pipe: "Connection[Answer, Denoise]") -> None:
        self.memory_in_use: Callable[[], int] | None = None
        self._pipe = pipe
        self._sending = threading.Lock()

    def send(self, answer: Answer) -> None:
        """Tell rank 0; when it is gone nobody needs to know."""
        with self._sending, suppress(OSError):
            self._pipe.send(answer)

    def beat(self) -> None:
        """Give signs of life for ever."""
        while True:
            self.send(RankAlive(self.memory_in_use() if self.memory_in_use else None))
            time.sleep(ALIVE_SECONDS)


def _read(pipe: "Connection[Answer, Denoise]", jobs: "queue.Queue[Denoise | None]") -> None:
    with suppress(EOFError, OSError):
        while True:
            jobs.put(pipe.recv())
    jobs.put(None)
    time.sleep(EXIT_GRACE_SECONDS)
    os._exit(0)  # a transfer waits for a rank that is gone


def _load(start: FollowerStart, answers: _Answers) -> LoadedPipeline | None:
    try:
        if start.device == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // start.size))
        else:
            torch.cuda.set_device(start.device)  # pinned memory makes a context on the current one
        loaded = load_pipeline(
            start.preset,
            device=start.device,
            dtype=start.dtype,
            memory=start.memory,
            compute=start.compute,
        )
    except Exception as error:
        answers.send(NotLoaded(error.message if isinstance(error, JobFailedError) else repr(error)))
        return None
    answers.memory_in_use = in_use_meter(loaded.device)
    answers.send(Loaded())
    group = ParallelGroup(start.rank, start.size, start.meeting, loaded.device, start.timeout_seconds)
    object.__setattr__(loaded, "parallel", group)  # a copy would have another placement of the weights
    return loaded


def _take_part(loaded: LoadedPipeline, job: Denoise) -> Ended:
    meter = peak_meter(loaded.device)
    meter.start()
    try:
        ended = _follow(loaded, job)
    finally:
        peak = meter.stop()
    return replace(ended, peak_memory_bytes=peak)


def _follow(loaded: LoadedPipeline, job: Denoise) -> Ended:
    group, params = loaded.parallel, job.params
    if group is None:
        raise RuntimeError("a follower without a group")
    group.has_stopped_together = False
    stages = StageRecorder(loaded.device, lambda event: None)
    try:
        never = CancelFlag(lambda: False)
        making = Making(loaded, params, None, 0.0, never, lambda event: None, stages)
        making.follow(lambda: unpacked(job.start, loaded.device))
    except (JobCancelledError, OtherRankFailedError):
        return Ended()
    except BaseException as error:
        shape = f"{params.num_frames} frames of {params.width}x{params.height} on {loaded.device}"
        public = ended_by(error, "denoise", shape)
        is_lost = not group.has_stopped_together
        return Ended(public if isinstance(public, JobFailedError) else None, is_lost)
    return Ended()
