"""The object store itself, over a real S3 server."""

import asyncio
import hashlib
import os
from pathlib import Path

import httpx
import pytest

from server.byte_ranges import ByteRange
from server.storage.keys import ObjectKey
from server.storage.objects import PART_BYTES, READ_BYTES, ObjectVideoStore, UploadStoppedError
from server.storage.opening import open_objects
from server.storage.store import StorageError
from tests.server.running_server import free_port
from tests.server.samples import UNKNOWN_ID
from tests.server.storage.bucket import URL, Bucket

VIDEO = ObjectKey(UNKNOWN_ID, 1, "video")


def never() -> bool:
    """Do not stop."""
    return False


async def whole(store: ObjectVideoStore, key: ObjectKey, part: ByteRange) -> list[bytes]:
    """The pieces of a part."""
    return [piece async for piece in store.read(key, part)]


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, 2 * PART_BYTES + 1])
def test_a_file_comes_back_as_it_went(bucket: Bucket, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    path = tmp_path / "1.mp4"
    path.write_bytes(data)
    store = bucket.store()
    asyncio.run(store.upload(VIDEO, path, never))
    assert asyncio.run(store.size(VIDEO)) == size
    pieces = asyncio.run(whole(store, VIDEO, ByteRange(0, size)))
    assert b"".join(pieces) == data
    assert all(len(piece) <= READ_BYTES for piece in pieces)
    assert bucket.names() == [f"videos/{UNKNOWN_ID}/1.mp4"]
    sha256 = hashlib.sha256(data).hexdigest()
    assert asyncio.run(store.is_stored(VIDEO, size, sha256))
    assert not asyncio.run(store.is_stored(VIDEO, size + 1, sha256))
    assert not asyncio.run(store.is_stored(VIDEO, size, "0" * 64))
    assert asyncio.run(store.keys_of(UNKNOWN_ID)) == [VIDEO]
    copy = tmp_path / "copy"
    asyncio.run(store.download(VIDEO, copy))
    assert copy.read_bytes() == data


def test_a_part_is_read_alone(bucket: Bucket) -> None:
    data = os.urandom(READ_BYTES + 100)
    bucket.write(str(VIDEO), data)
    start, stop = 50, READ_BYTES + 60
    pieces = asyncio.run(whole(bucket.store(), VIDEO, ByteRange(start, stop)))
    assert [len(piece) for piece in pieces] == [READ_BYTES, 10]
    assert b"".join(pieces) == data[start:stop]


def test_a_stopped_upload_leaves_nothing(bucket: Bucket, tmp_path: Path) -> None:
    path = tmp_path / "1.mp4"
    path.write_bytes(bytes(4 * PART_BYTES))
    asked = 0

    def stop_at_the_third_part() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    with pytest.raises(UploadStoppedError):
        asyncio.run(bucket.store().upload(VIDEO, path, stop_at_the_third_part))
    assert bucket.names() == []
    assert bucket.unfinished_uploads() == 0


def test_what_is_not_there(bucket: Bucket, tmp_path: Path) -> None:
    store = bucket.store()
    assert asyncio.run(store.size(VIDEO)) is None
    assert asyncio.run(store.preview(UNKNOWN_ID, 1)) is None
    assert not asyncio.run(store.is_stored(VIDEO, 0, ""))
    assert asyncio.run(store.keys_of(UNKNOWN_ID)) == []
    asyncio.run(store.delete([str(VIDEO)]))
    asyncio.run(store.remove(UNKNOWN_ID))
    with pytest.raises(StorageError, match="not in the store"):
        asyncio.run(store.download(VIDEO, tmp_path / "copy"))


def test_a_job_is_removed_whole_and_no_other(bucket: Bucket) -> None:
    other = ObjectKey("video_" + "1" * 32, 1, "video")
    for key in (VIDEO, ObjectKey(UNKNOWN_ID, 2, "preview"), other):
        bucket.write(str(key), b"1")
    asyncio.run(bucket.store().remove(UNKNOWN_ID))
    assert bucket.names() == [str(other)]


def test_an_object_says_what_it_is(bucket: Bucket) -> None:
    asyncio.run(bucket.store().put_bytes(VIDEO, b"1"))
    headers = bucket.read(str(VIDEO)).headers
    assert headers["content-type"] == "video/mp4"
    assert headers["content-disposition"] == f'inline; filename="{UNKNOWN_ID}.mp4"'


def test_a_link_works_without_a_key(bucket: Bucket) -> None:
    bucket.write(str(VIDEO), b"0123456789")
    assert asyncio.run(bucket.store().link(VIDEO)) is None
    link = asyncio.run(bucket.store(link_seconds=60).link(VIDEO))
    assert link is not None
    assert "X-Amz-Expires=60" in link
    assert httpx.get(link, headers={"range": "bytes=2-4"}).content == b"234"


def test_an_unreachable_store_says_so_in_a_line(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("server.storage.opening.RETRIES", 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    store = open_objects(URL, 0)
    with pytest.raises(StorageError, match="cannot look up") as caught:
        asyncio.run(store.size(VIDEO))
    assert "\n" not in str(caught.value)
    assert asyncio.run(store.preview(UNKNOWN_ID, 1)) is None
    asyncio.run(store.remove(UNKNOWN_ID))
    assert "objects_not_removed" in capsys.readouterr().out


def test_a_mounted_folder_is_a_store_too(tmp_path: Path) -> None:
    store = open_objects(f"file://{tmp_path}/store", 0)
    path = tmp_path / "1.mp4"
    path.write_bytes(bytes(PART_BYTES + 1))
    asyncio.run(store.upload(VIDEO, path, never))
    assert (tmp_path / "store" / str(VIDEO)).stat().st_size == PART_BYTES + 1
    assert asyncio.run(store.link(VIDEO)) is None
    asyncio.run(store.delete([str(VIDEO), "videos/none"]))
    assert asyncio.run(store.size(VIDEO)) is None


def test_a_mounted_folder_keeps_nothing_of_a_removed_job(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = open_objects(f"file://{root}", 0)
    keys = [ObjectKey(UNKNOWN_ID, attempt, kind) for attempt in (1, 2) for kind in ("video", "thumbnail")]
    other = ObjectKey("video_" + "1" * 32, 1, "video")
    for key in [*keys, other]:
        asyncio.run(store.put_bytes(key, b"1"))
    missing = str(ObjectKey(UNKNOWN_ID, 9, "video"))
    asyncio.run(store.delete([missing, str(keys[0]), missing, str(keys[1])]))
    assert asyncio.run(store.keys_of(UNKNOWN_ID)) == keys[2:]
    asyncio.run(store.remove(UNKNOWN_ID))
    asyncio.run(store.remove(UNKNOWN_ID))
    assert [path.relative_to(root).as_posix() for path in root.rglob("*")] == [
        "videos",
        f"videos/{other.job_id}",
        str(other),
    ]
    asyncio.run(store.put_bytes(keys[0], b"again"))
    assert asyncio.run(store.size(keys[0])) == 5


def test_one_object_that_cannot_be_removed_keeps_no_other(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = open_objects(f"file://{root}", 0)
    asyncio.run(store.put_bytes(VIDEO, b"1"))
    (root / "videos/folder/full").mkdir(parents=True)
    with pytest.raises(StorageError, match="cannot remove videos/folder"):
        asyncio.run(store.delete(["videos/folder", str(VIDEO)]))
    assert asyncio.run(store.size(VIDEO)) is None
