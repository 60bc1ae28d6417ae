"""The kernel compiles for GPUs that are not here, within their shared memory, with pipelined gathers."""

import json
import os
import subprocess
import sys

import pytest

KIB = 1024
SHARED_BYTES = {80: 163 * KIB, 89: 99 * KIB, 90: 227 * KIB, 120: 99 * KIB}  # most that one program may have
# A tile of 64 heads and 64 keys of 512: scores are 2 x 32 products of 64 x 32 x 16, half of them each of two
# warp groups (all of them each unless keys are split); values are 4 of 64 x 256 x 16 each.
WGMMA_64_512 = 32 + 4
TARGETS = (
    "80-64-512-bf16",
    "80-128-576-bf16",
    "89-64-512-bf16",
    "89-64-576-bf16",
    "89-16-512-fp32",
    "90-64-512-bf16",
    "90-128-576-bf16",
    "90-8-128-fp16",
    "120-64-512-bf16",
    "120-64-192-bf16",
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
    capability, heads = map(int, target.split("-")[:2])
    assert needs[target]["shared_bytes"] <= SHARED_BYTES[capability]
    assert needs[target]["asynchronous_copies"] > 0
    assert (needs[target]["wgmma"] > 0) == (capability == 90 and heads >= 64)


def test_warp_groups_share_the_scores(needs: dict[str, dict[str, int]]) -> None:
    assert needs["90-64-512-bf16"]["wgmma"] == WGMMA_64_512
