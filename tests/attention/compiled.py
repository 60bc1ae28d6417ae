"""Compiles an operator's kernel for GPUs that are not there, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

KIB = 1024
SHARED_BYTES = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 120: 99 * KIB}
"""The most shared memory that one program may have, by compute capability."""


def needs_of(package: str, targets: Sequence[str], cache: Path) -> dict[str, dict[str, int]]:
    """What ``compile_kernel`` of a package of tests says about each target."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    run = subprocess.run(
        [sys.executable, "-m", f"{package}.compile_kernel", *targets],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return dict(zip(targets, map(json.loads, run.stdout.splitlines()), strict=True))
