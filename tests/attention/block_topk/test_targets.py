"""The kernels compile for GPUs that are not here, within their shared memory."""

import pytest

from tests.attention.compiled import KIB, SHARED_BYTES, needs_of

TARGETS = (
    "80-128-bf16-rest",
    "89-256-fp32",
    "90-128-bf16-rest",
    "90-96-bf16",
    "120-64-fp16-rest",
    "90-128-gluonbf16",
    "90-128-gluonbf16-rest",
    "90-64-gluonfp16",
)
# Products of 64 x 128 x 16 (and 64 x 64 x 16) of each group: the scores of the first tile, those of the
# others beside values, the values of the last tile; and mean keys, which have a loop of their own.
HOPPER_WGMMA = {
    "90-128-gluonbf16": 2 * 4 * 8,
    "90-128-gluonbf16-rest": 2 * 6 * 8,
    "90-64-gluonfp16": 3 * (2 * 4 + 2 * 8),
}


@pytest.fixture(scope="module")
def needs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    return needs_of(str(__package__), TARGETS, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_within_shared_memory(target: str, needs: dict[str, dict[str, int]]) -> None:
    capability, head_dim = target.split("-")[:2]
    assert needs[target]["shared_bytes"] <= SHARED_BYTES[int(capability)]
    assert needs[target]["shared_bytes_of_selection"] <= 48 * KIB
    is_hopper = capability == "90"
    assert (needs[target]["wgmma"] > 0) == is_hopper
    assert (needs[target]["bulk_copies"] > 0) == (is_hopper and head_dim != "96")


@pytest.mark.parametrize("target", HOPPER_WGMMA)
def test_no_product_of_hoppers_kernel_is_done_twice(target: str, needs: dict[str, dict[str, int]]) -> None:
    assert needs[target]["wgmma"] == HOPPER_WGMMA[target]
