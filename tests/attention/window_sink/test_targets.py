"""The kernel compiles for GPUs that are not here, within their shared memory, with pipelined loads."""

import pytest

from tests.attention.compiled import SHARED_BYTES, needs_of

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
    return needs_of(str(__package__), TARGETS, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_within_shared_memory(target: str, needs: dict[str, dict[str, int]]) -> None:
    capability = int(target.split("-")[0])
    assert needs[target]["shared_bytes"] <= SHARED_BYTES[capability]
    assert needs[target]["asynchronous_copies"] > 0
    assert (needs[target]["wgmma"] > 0) == (capability == 90)
