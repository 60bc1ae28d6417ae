"""Which program of a persistent kernel computes which item of work, and when.

Items are handed out ahead of time as a counter in memory would: in order, each to the program that has the
least to do so far; those that take long should come first. So all end at about the same time, and nothing is
counted on the GPU.

Knows costs. Does not know what an item is.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The work of all programs.

    Attributes:
        items: int32 [items, fields], on the device. The items of a program are neighbours.
        starts: int32 [programs + 1], on the device; the items of program p are ``starts[p]`` to
            ``starts[p + 1]``.
        programs: how many programs there are.
    """

    items: Tensor
    starts: Tensor
    programs: int


def handed_out(items: Tensor, costs: Sequence[int], programs: int, device: torch.device) -> Schedule:
    """The schedule for int32 items [items, fields] of these costs, in any unit."""
    program = torch.tensor(_programs(costs, programs), dtype=torch.int64)
    starts = torch.zeros(programs + 1, dtype=torch.int32)
    starts[1:] = program.bincount(minlength=programs).cumsum(0)
    items = items[program.argsort(stable=True)].contiguous()
    return Schedule(items.to(device), starts.to(device), programs)


def _programs(costs: Sequence[int], programs: int) -> list[int]:
    """The program of each item."""
    loads = [(0, program) for program in range(programs)]
    found = []
    for cost in costs:
        load, program = loads[0]
        heapq.heapreplace(loads, (load + cost, program))
        found.append(program)
    return found
