"""What every GPU benchmark needs: device time by events, and a description of the machine."""

import platform
import statistics
from collections.abc import Callable, Sequence
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
    seconds = sorted(begin.elapsed_time(end) / 1e3 for begin, end in zip(begins, ends, strict=True))
    return Timing(statistics.median(seconds), seconds[repeats // 10], seconds[-1 - repeats // 10])


def graph_seconds(calls: Sequence[Callable[[], object]]) -> Timing:
    """Device seconds of one call: all of them in one CUDA graph, replayed."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    timing = device_seconds(graph.replay)
    count = len(calls)
    return Timing(timing.median_seconds / count, timing.p10_seconds / count, timing.p90_seconds / count)
