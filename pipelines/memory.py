"""Peak memory of a stage.

Knows: how this machine counts memory. Does not know: stages. On CUDA: the most bytes that torch had
allocated on the device, weights included. On a CPU: the process's largest resident set (weights, Python and
torch itself included; ffmpeg, another process, not). Linux lets a process reset that mark; where it does not,
a thread samples the resident set every few milliseconds; other systems only know the peak since the process
started.
"""

import sys
import threading
from pathlib import Path
from typing import Protocol

import torch

SAMPLE_SECONDS = 0.005


class PeakMeter(Protocol):
    """Measures from ``start`` to ``stop``."""

    def start(self) -> None:
        """Forget earlier peaks."""

    def stop(self) -> int:
        """Peak bytes since ``start``."""


def peak_meter(device: torch.device) -> PeakMeter:
    """The most exact meter that this device and system have."""
    if device.type == "cuda":
        return CudaPeak(device)
    if not Path("/proc/self/status").is_file():
        return LifetimePeak()
    return ResidentPeak() if ResidentPeak.can_reset() else SampledPeak()


def release_memory(device: torch.device) -> None:
    """Give cached device memory back, so that the next job starts unfragmented."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


class CudaPeak:
    """Torch's own count of allocated device memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class ResidentPeak:
    """The kernel's high-water mark of the resident set, reset at the start."""

    _RESET = Path("/proc/self/clear_refs")

    @classmethod
    def can_reset(cls) -> bool:
        """Whether this kernel and container let a process reset its mark."""
        try:
            cls._RESET.write_text("5")
        except OSError:
            return False
        return True

    def start(self) -> None:
        self._RESET.write_text("5")

    def stop(self) -> int:
        return _status_bytes("VmHWM")


class SampledPeak:
    """The largest of many samples of the resident set."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._peak = 0
        self._thread = threading.Thread(target=self._sample, name="reelwright-memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._peak

    def _sample(self) -> None:
        while True:
            self._peak = max(self._peak, _status_bytes("VmRSS"))
            if self._done.wait(SAMPLE_SECONDS):
                return


class LifetimePeak:
    """The peak since the process started: all that systems without /proc tell."""

    def start(self) -> None:
        """Nothing to reset."""

    def stop(self) -> int:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
