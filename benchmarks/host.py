"""The computer that a benchmark runs on, whatever its device is."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch


@dataclass(frozen=True, slots=True)
class Host:
    """Processor and versions; ``threads`` is what torch uses, ``gpu`` the current CUDA device's name."""

    cpu: str
    cores: int
    threads: int
    gpu: str | None
    torch: str
    diffusers: str
    python: str


def this_host() -> Host:
    """The computer that this process runs on."""
    return Host(
        cpu=_cpu_name(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        torch=torch.__version__,
        diffusers=diffusers.__version__,
        python=platform.python_version(),
    )


def _cpu_name() -> str:
    """The model name that Linux gives, elsewhere what Python knows."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
