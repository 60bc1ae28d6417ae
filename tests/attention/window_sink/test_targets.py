"""The kernel compiles for GPUs that are not here, within their shared memory, with pipelined loads."""

import json
import os
import subprocess
import sys

import pytest

KIB = 1024
SHARED_BYTES = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 120: 99 * KIB}  # most that one program may have
TARGETS = (
    "80-64-bf16-none",
    "89-256-fp32-key0_bias",
    "90-64-bf16-key0_bias",
    "90-72-bf16-null_logit",
    "80-64-bf16-null_logit-frames",
    "89-256-bf16-key0_bias-frames",
    "90-128-bf16-none-frames",
    "120-128-bf16-none-frames",
)


@pytest.fixture(scope="module")
def needs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    run = subprocess.run(
        [sys.executable, "-m", f"{__package__}.compile_kernel", *TARGETS],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return dict(zip(TARGETS, map(json.loads, run.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_within_shared_memory(target: str, needs: dict[str, dict[str, int]]) -> None:
    capability = int(target.split("-")[0])
    assert needs[target]["shared_bytes"] <= SHARED_BYTES[capability]
    assert needs[target]["asynchronous_copies"] > 0
    assert (needs[target]["wgmma"] > 0) == (capability == 90)
