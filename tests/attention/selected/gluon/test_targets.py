"""The kernel compiles within Hopper's shared memory and registers; products do not wait for each other."""

import pytest

from tests.attention.compiled import SHARED_BYTES, needs_of

TARGETS = ("512-bf16", "512-fp16", "576-bf16")


@pytest.fixture(scope="module")
def needs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    return needs_of(str(__package__), TARGETS, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("target", TARGETS)
def test_fits_the_multiprocessor(target: str, needs: dict[str, dict[str, int]]) -> None:
    assert needs[target]["shared_bytes"] <= SHARED_BYTES[90]
    # Each partition begins by taking its registers. The producer may hold an address or two in memory.
    assert needs[target]["spills_of_consumers"] == 0
    assert needs[target]["spills"] <= 8


@pytest.mark.parametrize("target", TARGETS)
def test_copies_of_16_bytes_that_the_producer_does_not_wait_for(
    target: str, needs: dict[str, dict[str, int]]
) -> None:
    """A thread copies 4 rows of 8 x 16 bytes of every tile of 64 rows, and as much of the queries."""
    assert needs[target]["asynchronous_copies"] >= 48


def test_no_product_is_done_twice(needs: dict[str, dict[str, int]]) -> None:
    """Each consumer: 32 of 64 x 64 x 16, the scores of its tile; 4 of 64 x 256 x 16, the values, of two."""
    assert needs["512-bf16"]["products"] == 2 * (32 + 2 * 4)


@pytest.mark.parametrize("target", TARGETS)
def test_products_run_back_to_back(target: str, needs: dict[str, dict[str, int]]) -> None:
    """Were they serialised, there would be a wait after each."""
    assert needs[target]["waits_for_products"] <= needs[target]["products"] / 8
