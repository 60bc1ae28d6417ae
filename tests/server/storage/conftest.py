"""One S3 server for the tests of this folder, with an empty bucket for each."""

from collections.abc import Iterator

import pytest

from tests.server.storage.bucket import Bucket


@pytest.fixture(scope="session")
def s3() -> Iterator[Bucket]:
    """The server."""
    with Bucket() as bucket:
        yield bucket


@pytest.fixture
def bucket(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket; this process may use it."""
    s3.empty()
    for name, value in s3.variables().items():
        monkeypatch.setenv(name, value)
    return s3
