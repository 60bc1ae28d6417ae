"""The kernel compiles for GPUs that are not here, within their shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KIB = 1024
SHARED_BYTES = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB}  # most that one program may have


@pytest.mark.parametrize(
    ("capability", "head_dim", "dtype"),
    [
        (80, 128, "bf16"),
        (89, 128, "fp16"),
        (89, 256, "bf16"),
        (89, 256, "fp32"),
        (90, 128, "bf16"),
        (90, 96, "bf16"),
    ],
)
def test_compiles_within_shared_memory(capability: int, head_dim: int, dtype: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", f"{__package__}.compile_kernel", str(capability), str(head_dim), dtype],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    needs = json.loads(run.stdout)
    assert needs["shared_bytes"] <= SHARED_BYTES[capability]
    is_hopper = capability >= 90
    assert (needs["wgmma"] > 0) == is_hopper
    assert (needs["bulk_copies"] > 0) == (is_hopper and head_dim == 128)
