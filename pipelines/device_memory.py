"""How much memory a device has, and how much of it is in use.

Knows: where torch and the operating system say so. Does not know: what uses it.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def total_bytes(device: torch.device) -> int:
    """All the memory of a GPU; on a CPU what the machine has, or what the container may use of it."""
    if device.type != "cuda":
        return _host_bytes()
    return int(torch.cuda.get_device_properties(device).total_memory)


def in_use_meter(device: torch.device) -> Callable[[], int]:
    """Reads what torch has allocated on a GPU, or this process's resident set on a CPU."""
    if device.type != "cuda":
        return _resident_bytes
    return lambda: int(torch.cuda.memory_allocated(device))


def _host_bytes() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CONTAINER_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdecimal() else machine


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    # Without /proc only the peak is known: bytes on macOS, the one such system that this runs on.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
