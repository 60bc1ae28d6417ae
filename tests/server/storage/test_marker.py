"""The marker of the database in a real S3 bucket and in a folder."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from server.identity import Owner, owner_of
from server.storage.marker import NAME, Claimed, StoreTakenError, claim_store
from server.storage.objects import ObjectVideoStore
from server.storage.opening import open_objects
from server.storage.store import StorageError
from tests.server.databases import JobDatabase
from tests.server.storage.bucket import URL, Bucket

OURS, THEIRS = Owner("a" * 32, "postgresql://db/jobs"), Owner("b" * 32, "postgresql://other/jobs")


@pytest.fixture(params=["s3", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path, bucket: Bucket) -> ObjectVideoStore:
    """An empty one."""
    return open_objects(URL if request.param == "s3" else f"file://{tmp_path}/store", 0)


def test_the_first_database_gets_the_store(store: ObjectVideoStore) -> None:
    asyncio.run(claim_store(store, OURS))
    asyncio.run(claim_store(store, OURS))
    with pytest.raises(StoreTakenError) as caught:
        asyncio.run(claim_store(store, THEIRS))
    for part in (OURS.id, OURS.name, THEIRS.id, THEIRS.name, NAME):
        assert part in str(caught.value)
    marker = asyncio.run(store.read_whole(NAME))
    assert marker is not None
    assert json.loads(marker)["id"] == OURS.id


def test_a_database_that_moved_keeps_its_store(store: ObjectVideoStore) -> None:
    asyncio.run(claim_store(store, OURS))
    asyncio.run(claim_store(store, Owner(OURS.id, "postgresql://elsewhere/jobs")))


def test_of_two_that_come_at_once_one_gets_it(store: ObjectVideoStore) -> None:
    owners = [Owner(str(number) * 32, "postgresql://db/jobs") for number in range(6)]

    def try_to(owner: Owner) -> bool:
        try:
            asyncio.run(claim_store(store, owner))
        except StoreTakenError:
            return False
        return True

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(try_to, owners)) == 1


def test_a_marker_that_names_nobody_is_nobodys(store: ObjectVideoStore) -> None:
    asyncio.run(store.create(NAME, b"[]"))
    with pytest.raises(StorageError, match="does not name a database"):
        asyncio.run(claim_store(store, OURS))


def test_what_was_asked_once_is_asked_again_before_a_sweep(store: ObjectVideoStore) -> None:
    claimed = Claimed(store, OURS)
    asyncio.run(claimed.check())
    asyncio.run(store.delete([NAME]))
    asyncio.run(store.create(NAME, json.dumps({"id": THEIRS.id, "name": THEIRS.name}).encode()))
    asyncio.run(claimed.check())
    with pytest.raises(StoreTakenError):
        asyncio.run(claimed.check_again())


def test_each_database_has_an_id_that_stays(made: JobDatabase) -> None:
    owner = owner_of(made.database)
    made.database.migrate()
    assert owner_of(made.database) == owner
    assert len(owner.id) == 32
    assert "jobs.sqlite3" in owner.name if made.url is None else owner.name.startswith("postgresql://")
