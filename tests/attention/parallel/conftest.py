"""Four ranks for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="package")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool
