"""Kernels compiled by several processes before a benchmark needs them, through Triton's cache on disk."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Job = TypeVar("Job")
_MOST_PROCESSES = 14  # each holds a CUDA context


@contextmanager
def compiling(call: Callable[[Job], object], jobs: Sequence[Job]) -> Iterator[None]:
    """Call the function for every job in other processes, the first jobs first, while the block runs.

    It should launch what the benchmark will, on tensors of the same dtypes and alignment, however small. All
    calls have ended when the block has.

    Raises:
        Exception: what a call raised.
    """
    processes = min(len(jobs), os.cpu_count() or 1, _MOST_PROCESSES)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        results = [pool.submit(call, job) for job in jobs]
        yield
        for result in results:
            result.result()
