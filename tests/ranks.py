"""Processes that are each other's ranks, over gloo on this machine's CPU; tests run functions on them.

Knows: torch.distributed and processes. Does not know: what is run. They are forked from a server that has
imported torch and Diffusers once, which costs less than a start of each; a pool serves all its tests.
"""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
import torch.distributed as dist

from attention import RankGroup

P = ParamSpec("P")
R = TypeVar("R")
# A hung rank must fail its test. A slow machine needs minutes for nothing here.
TIMEOUT_SECONDS = 120
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "diffusers", "tests.attention.families.variants"])


class RankPool:
    """So many processes; ``run`` calls a function in the first few of them."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._pipes: list[Connection[Any, Any]] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(TIMEOUT_SECONDS)
            process.kill()
        self._folder.cleanup()

    def run(
        self, ranks: int, function: Callable[Concatenate[RankGroup, P], R], *args: P.args, **options: P.kwargs
    ) -> list[R]:
        """What the function returns on each rank."""
        for pipe in self._pipes[:ranks]:
            pipe.send((ranks, function, args, options))
        answers = [self._answer(pipe) for pipe in self._pipes[:ranks]]
        failures = [text for text, _ in answers if text is not None]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def _answer(self, pipe: "Connection[Any, Any]") -> tuple[str | None, Any]:
        if not pipe.poll(TIMEOUT_SECONDS):
            raise AssertionError(f"a rank did not answer within {TIMEOUT_SECONDS} seconds")
        answer: tuple[str | None, Any] = pipe.recv()
        return answer


def _serve(rank: int, size: int, store: Path, pipe: "Connection[Any, Any]") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
    try:
        while True:
            ranks, function, args, options = pipe.recv()
            answer: tuple[str | None, Any]
            try:
                with torch.no_grad():
                    answer = (None, function(RankGroup(groups[ranks]), *args, **options))
            except Exception:
                answer = (f"rank {rank} of {ranks}:\n{traceback.format_exc()}", None)
            pipe.send(answer)
    except EOFError:
        dist.destroy_process_group()
