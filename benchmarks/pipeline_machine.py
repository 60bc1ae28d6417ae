"""The machine that a process of the pipeline benchmark runs on: GPU, driver, versions, processor."""

import subprocess
from dataclasses import asdict

from benchmarks.gpu import machine
from benchmarks.host import this_host


def describe_machine() -> dict[str, object]:
    """Names and versions for the JSON file."""
    return {**asdict(this_host()), **machine(), "driver": driver_version()}


def driver_version() -> str | None:
    """Version of NVIDIA's driver, None where there is none."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.splitlines()[0].strip() if said.strip() else None
