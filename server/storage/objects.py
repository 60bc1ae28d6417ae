"""An object store: S3, Google Cloud Storage, Azure, or a folder that several hosts mount.

Knows: obstore, and that one request fails or hangs now and then. Does not know: jobs' rows, or when to try
again (object_files.py). Needs the extra ``s3``; opening.py says so when it is missing.
"""

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError
from obstore.store import AzureStore, GCSStore, LocalStore, ObjectStore, S3Store

from server import logs
from server.byte_ranges import ByteRange
from server.storage.keys import CONTENT_TYPES, FOLDER, ObjectKey, folder_of
from server.storage.store import StorageError

# One piece is one request, so a slow client holds no connection to the store.
READ_BYTES = 1024 * 1024
# From this size on a file goes up in parts, of which so many at a time.
PART_BYTES = 8 * 1024 * 1024
PARTS_AT_ONCE = 4
LIST_PAGE = 1000


class UploadStoppedError(Exception):
    """The upload was told to stop; no part of the file is left in the store."""


@dataclass(frozen=True, slots=True)
class ListedObject:
    """An object as a listing shows it. ``name`` is below the store's prefix."""

    name: str
    modified_at: datetime


class ObjectVideoStore:
    """Implements VideoStore, and what a supervisor needs beside that. Any thread may use it.

    Args:
        store: bucket, prefix and credentials.
        link_seconds: how long a link is valid; 0: there are none.
    """

    def __init__(self, store: ObjectStore, link_seconds: int = 0) -> None:
        self._store = store
        self._link_for = timedelta(seconds=link_seconds)

    @property
    def gives_links(self) -> bool:
        """Whether it can sign URLs at all."""
        return isinstance(self._store, (S3Store, GCSStore, AzureStore))

    async def size(self, key: ObjectKey) -> int | None:
        with _errors(f"look up {key}"):
            try:
                return (await obstore.head_async(self._store, str(key)))["size"]
            except FileNotFoundError:
                return None

    async def read(self, key: ObjectKey, part: ByteRange) -> AsyncIterator[bytes]:
        for start in range(part.start, part.stop, READ_BYTES):
            stop = min(part.stop, start + READ_BYTES)
            with _errors(f"read {key}"):
                piece = await obstore.get_range_async(self._store, str(key), start=start, end=stop)
            yield bytes(piece)

    async def link(self, key: ObjectKey) -> str | None:
        if not self._link_for or not isinstance(self._store, (S3Store, GCSStore, AzureStore)):
            return None
        with _errors(f"sign a link to {key}"):
            return await obstore.sign_async(self._store, "GET", str(key), self._link_for)

    async def preview(self, job_id: str, attempt: int) -> bytes | None:
        key = ObjectKey(job_id, attempt, "preview")
        try:
            with _errors(f"read {key}"):
                return bytes(await (await obstore.get_async(self._store, str(key))).bytes_async())
        except StorageError as error:
            logs.get_logger().debug("preview_not_read", job=job_id, message=str(error))
            return None

    async def remove(self, job_id: str) -> None:
        try:
            with _errors(f"list {folder_of(job_id)}"):
                listed = await obstore.list(self._store, folder_of(job_id)).collect_async()
            await self.delete([entry["path"] for entry in listed])
        except StorageError as error:
            logs.get_logger().warning("objects_not_removed", job=job_id, message=str(error))

    async def read_whole(self, name: str) -> bytes | None:
        """A small object of any name, None when it is not there. Raises StorageError."""
        with _errors(f"read {name}"):
            try:
                return bytes(await (await obstore.get_async(self._store, name)).bytes_async())
            except FileNotFoundError:
                return None

    async def create(self, name: str, data: bytes) -> None:
        """Write a small object unless it is there already. Raises StorageError.

        A store that knows no conditional writes replaces it: who must know reads it again.
        """
        with _errors(f"write {name}"):
            try:
                await obstore.put_async(self._store, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return
            except NotSupportedError:
                await obstore.put_async(self._store, name, data, use_multipart=False)

    async def put_bytes(self, key: ObjectKey, data: bytes) -> None:
        """Replace an object at once. Raises StorageError."""
        with _errors(f"write {key}"):
            await obstore.put_async(
                self._store, str(key), data, attributes=self._attributes(key), use_multipart=False
            )

    async def upload(self, key: ObjectKey, path: Path, is_stopped: Callable[[], bool]) -> None:
        """Replace an object by a file, in parts if it is large. Readers see the whole one or none.

        Raises:
            StorageError: it is not there, or not known to be. UploadStoppedError: ``is_stopped``.
            OSError: the file cannot be read.
        """
        with path.open("rb") as file:
            first = file.read(PART_BYTES)
            if len(first) < PART_BYTES:
                await self.put_bytes(key, first)
                return

            # When this breaks off, obstore tells the store to forget the parts sent so far.
            async def parts() -> AsyncIterator[bytes]:
                part = first
                while part:
                    if is_stopped():
                        raise UploadStoppedError
                    yield part
                    part = file.read(PART_BYTES)

            with _errors(f"upload {key}"):
                await obstore.put_async(
                    self._store,
                    str(key),
                    parts(),
                    attributes=self._attributes(key),
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS_AT_ONCE,
                )

    async def download(self, key: ObjectKey, path: Path) -> None:
        """Write an object to a file. Raises StorageError, OSError."""
        size = await self.size(key)
        if size is None:
            raise StorageError(f"{key} is not in the store any more")
        with path.open("wb") as file:
            async for piece in self.read(key, ByteRange(0, size)):
                file.write(piece)

    async def is_stored(self, key: ObjectKey, size: int, sha256: str) -> bool:
        """Whether the object has that content, by reading all of it. Raises StorageError."""
        if await self.size(key) != size:
            return False
        digest = hashlib.sha256()
        async for piece in self.read(key, ByteRange(0, size)):
            digest.update(piece)
        return digest.hexdigest() == sha256

    async def keys_of(self, job_id: str) -> list[ObjectKey]:
        """What lies there of a job. Raises StorageError."""
        with _errors(f"list {folder_of(job_id)}"):
            listed = await obstore.list(self._store, folder_of(job_id)).collect_async()
        keys = (ObjectKey.parse(entry["path"]) for entry in listed)
        return [key for key in keys if key is not None]

    async def all_objects(self) -> AsyncIterator[ListedObject]:
        """Everything below ``videos/``. Raises StorageError."""
        with _errors(f"list {FOLDER}"):
            async for page in obstore.list(self._store, FOLDER, chunk_size=LIST_PAGE):
                for entry in page:
                    yield ListedObject(entry["path"], entry["last_modified"])

    async def delete(self, names: list[str]) -> None:
        """Remove objects; those that are not there are no error.

        Raises StorageError: one could not be removed; all others were tried too.
        """
        if not names:
            return
        if isinstance(self._store, S3Store):
            with _errors(f"remove {len(names)} objects"):
                await obstore.delete_async(self._store, names)
            return
        failures = []
        for name in names:
            try:
                with _errors(f"remove {name}"), suppress(FileNotFoundError):
                    await obstore.delete_async(self._store, name)
            except StorageError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _attributes(self, key: ObjectKey) -> dict[str, str] | None:
        if isinstance(self._store, LocalStore):
            return None  # a folder keeps none
        return {
            "Content-Type": CONTENT_TYPES[key.kind],
            "Content-Disposition": f'inline; filename="{key.shown_name}"',
            "Cache-Control": "private, no-cache",
        }


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError) as error:
        # After the first paragraph obstore prints its own structures.
        first = " ".join(str(error).partition("\n\n")[0].split()) or type(error).__name__
        raise StorageError(f"cannot {what}: {first}") from error
