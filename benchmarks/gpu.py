"""What every GPU benchmark needs: device time by events, and a description of the machine."""

import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import triton


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a benchmark ran."""

    gpu: str
    driver_cuda: str | None
    torch: str
    triton: str
    python: str


@dataclass(frozen=True, slots=True)
class Timing:
    """Device seconds of one call: median and the spread between the 10th and 90th percentile."""

    median_seconds: float
    p10_seconds: float
    p90_seconds: float


def machine() -> dict[str, str | None]:
    """GPU name and versions, for the JSON file."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return asdict(
        Machine(name, torch.version.cuda, torch.__version__, triton.__version__, platform.python_version())
    )


def device_seconds(call: Callable[[], object], repeats: int = 30, warm_up: int = 3) -> Timing:
    """Time a call by CUDA events, one pair each repeat."""
    for _ in range(warm_up):
        call()
    begins = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return _timing([begin.elapsed_time(end) / 1e3 for begin, end in zip(begins, ends, strict=True)])


def interleaved_seconds(calls: Mapping[str, Callable[[], object]], rounds: int = 15) -> dict[str, Timing]:
    """Device seconds of several calls, each once a round, in another random order every round.

    So all of them meet the same clocks and temperatures, and no one always follows the same other one.
    """
    order, shuffle = list(calls), random.Random(0).shuffle
    for name in order:
        calls[name]()
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            calls[name]()
            end.record()
            pairs[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: _timing([begin.elapsed_time(end) / 1e3 for begin, end in events])
        for name, events in pairs.items()
    }


def _timing(seconds: list[float]) -> Timing:
    ranked = sorted(seconds)
    tenth = len(ranked) // 10
    return Timing(statistics.median(ranked), ranked[tenth], ranked[-1 - tenth])


def graph_seconds(calls: Sequence[Callable[[], object]], repeats: int = 30) -> Timing:
    """Device seconds of one call: all of them in one CUDA graph, replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    timing = device_seconds(graph.replay, repeats)
    count = len(calls)
    return Timing(timing.median_seconds / count, timing.p10_seconds / count, timing.p90_seconds / count)
