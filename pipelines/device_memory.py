"""How much memory a device has, and how much of it is in use.

Knows: where torch and the operating system say so. Does not know: what uses it.
"""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import torch

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CONTAINER_USE = Path("/sys/fs/cgroup/memory.current")
_CONTAINER_STATISTICS = Path("/sys/fs/cgroup/memory.stat")
_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")


def total_bytes(device: torch.device) -> int:
    """All the memory of a GPU; on a CPU what the machine has, or what the container may use of it."""
    if device.type != "cuda":
        return _host_bytes()
    return int(torch.cuda.get_device_properties(device).total_memory)


def available_bytes(device: torch.device, limit_bytes: int | None = None) -> int:
    """Bytes that tensors could take now: on a GPU all of this process's, those it has included; on a CPU what
    this process could take on top of what it has. ``limit_bytes``: what it may have in all."""
    if device.type == "cuda":
        device = _indexed(device)
        free, total = torch.cuda.mem_get_info(device)
        share = int(torch.cuda.get_per_process_memory_fraction(device) * total)
        return min(free + torch.cuda.memory_reserved(device), share, limit_bytes or total)
    found = [_host_free_bytes()]
    if limit_bytes is not None:
        found.append(limit_bytes - _resident_bytes())
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY and (mapped := _mapped_bytes()) is not None:
        found.append(most - mapped)
    return max(0, min(found))


def limit_memory(device: torch.device, limit_bytes: int) -> None:
    """Let this process have no more of a GPU than that: torch then runs out of memory as on a smaller one."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), _indexed(device))


def in_use_meter(device: torch.device) -> Callable[[], int]:
    """Reads what torch has allocated on a GPU, or this process's resident set on a CPU."""
    if device.type != "cuda":
        return _resident_bytes
    return lambda: int(torch.cuda.memory_allocated(device))


def _indexed(device: torch.device) -> torch.device:
    """The GPU with its number, which torch wants here; without one it is the current one."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _host_bytes() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CONTAINER_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdecimal() else machine


def _host_free_bytes() -> int:
    """What the machine, or the container, could still give; all it has where the system does not say."""
    machine = _host_bytes()
    if _MEMINFO.is_file():
        machine = min(machine, 1024 * _entries(_MEMINFO)["MemAvailable"])
    try:
        limit = _CONTAINER_LIMIT.read_text(encoding="ascii").strip()
        used = (
            int(_CONTAINER_USE.read_text(encoding="ascii")) - _entries(_CONTAINER_STATISTICS)["inactive_file"]
        )
    except OSError:
        return machine
    return min(machine, int(limit) - used) if limit.isdecimal() else machine


def _entries(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {name.rstrip(":"): int(number) for name, number, *_ in lines}


def _mapped_bytes() -> int | None:
    """Of this process's address space; None where the system does not say."""
    if not _STATM.is_file():
        return None
    return int(_STATM.read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _resident_bytes() -> int:
    if _STATM.is_file():
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # Without /proc only the peak is known: bytes on macOS, the one such system that this runs on.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
