"""Seconds of first and second calls at fresh lengths, in fresh processes: Triton's cache empty, then filled.

    python -m benchmarks.attention_first_call empty      # one process of the two; prints JSON

Knows processes and clocks. Does not know what compiles.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from attention.choice import Precision
from benchmarks.attention_cases import Shape, inputs, kernel_call

LENGTHS = (32_760, 4_001, 75_600)
PRECISIONS: tuple[Precision, ...] = ("full", "fp8")


@dataclass(frozen=True, slots=True)
class FirstCall:
    """Wall seconds until the device has finished."""

    cache: str
    precision: Precision
    tokens: int
    first_seconds: float
    second_seconds: float


def first_calls(
    cache: str, device: str = "cuda", lengths: tuple[int, ...] = LENGTHS, heads: int = 12
) -> list[FirstCall]:
    """In this process: each length in turn, in both precisions."""
    found = []
    for tokens in lengths:
        shape = Shape(tokens, heads, 128, 3120, 16)
        for precision in PRECISIONS:
            call = kernel_call(shape, inputs(shape, device), precision)
            seconds = []
            for _ in range(2):
                _wait(device)
                begin = time.perf_counter()
                call()
                _wait(device)
                seconds.append(time.perf_counter() - begin)
            found.append(FirstCall(cache, precision, tokens, *seconds))
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def in_fresh_processes() -> list[FirstCall]:
    """Two processes in a row share a cache folder that did not exist before."""
    with tempfile.TemporaryDirectory() as folder:
        return [call for cache in ("empty", "filled") for call in _process(cache, folder)]


def _process(cache: str, folder: str) -> list[FirstCall]:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.attention_first_call", cache],
        env=os.environ | {"TRITON_CACHE_DIR": folder},
        cwd=Path(__file__).parents[1],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [FirstCall(**call) for call in json.loads(run.stdout)]


def first_call_table(calls: list[FirstCall]) -> str:
    """As Markdown."""
    lines = ["| Triton's cache | precision | tokens | first call | second call |", "|---" * 5 + "|"]
    lines += [
        f"| {call.cache} | {call.precision} | {call.tokens:,} | {call.first_seconds:.3f} s | "
        f"{call.second_seconds:.4f} s |"
        for call in calls
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps([asdict(call) for call in first_calls(sys.argv[1])]))
