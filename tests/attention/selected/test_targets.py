"""The kernel compiles for GPUs that are not here, within their shared memory, with pipelined gathers."""

import pytest

from tests.attention.compiled import SHARED_BYTES, needs_of

# Products of each of the two warp groups in a step. 64 keys of 512: scores of half the keys are 32 products
# of 64 x 32 x 16 (twice as many if keys were not split), values 4 of 64 x 256 x 16. 32 keys of 512 and 64:
# scores 32 and 4, values 2 and 2.
WGMMA = {"90-64-512-bf16": 32 + 4, "90-128-576-bf16": 32 + 4 + 2 + 2}
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
    return needs_of(str(__package__), TARGETS, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_within_shared_memory(target: str, needs: dict[str, dict[str, int]]) -> None:
    capability, heads = map(int, target.split("-")[:2])
    assert needs[target]["shared_bytes"] <= SHARED_BYTES[capability]
    assert needs[target]["asynchronous_copies"] > 0
    assert (needs[target]["wgmma"] > 0) == (capability == 90 and heads >= 64)


@pytest.mark.parametrize("target", WGMMA)
def test_warp_groups_share_the_scores(target: str, needs: dict[str, dict[str, int]]) -> None:
    assert needs[target]["wgmma"] == WGMMA[target]
