"""The object that says which database a store belongs to: sweeps remove what that database does not know.

Knows: the marker's name and content, and who may write it. Does not know: what is done with other objects.
"""

import json
from typing import Protocol

from server.identity import Owner
from server.storage.store import StorageError

NAME = "reelwright-database.json"


class StoreTakenError(StorageError):
    """The store belongs to another database."""

    def __init__(self, found: Owner, ours: Owner) -> None:
        super().__init__(
            f"the store belongs to the database {found.name} (id {found.id}), and this process uses "
            f"{ours.name} (id {ours.id}): each would remove the other's files. Choose another bucket or "
            f"prefix; if that database is gone for good, remove the object {NAME}"
        )


class SmallObjects(Protocol):
    """The part of a store that is needed here."""

    async def read_whole(self, name: str) -> bytes | None:
        """An object, None when it is not there. Raises StorageError."""
        ...

    async def create(self, name: str, data: bytes) -> None:
        """Write an object unless it is there. Raises StorageError."""
        ...


async def claim_store(store: SmallObjects, ours: Owner) -> None:
    """Make sure that the store is this database's; a store without a marker becomes it.

    The marker is read again after it was written: two that come at once find the same one.
    Raises StorageError.
    """
    found = await _read(store)
    if found is None:
        content = {"id": ours.id, "name": ours.name}
        await store.create(NAME, json.dumps(content, indent=2).encode())
        found = await _read(store)
        if found is None:
            raise StorageError(f"{NAME} was written to the store and is not there")
    if found.id != ours.id:
        raise StoreTakenError(found, ours)


async def _read(store: SmallObjects) -> Owner | None:
    text = await store.read_whole(NAME)
    if text is None:
        return None
    try:
        content = json.loads(text)
        return Owner(str(content["id"]), str(content["name"]))
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{NAME} in the store does not name a database: {text[:80]!r}") from error


class Claimed:
    """A store that is this database's, as far as that could be asked yet."""

    def __init__(self, store: SmallObjects, ours: Owner) -> None:
        self._store = store
        self._ours = ours
        self._is_ours = False

    async def check(self) -> None:
        """Before something is written for good: asks until it was answered once. Raises StorageError."""
        if not self._is_ours:
            await self.check_again()

    async def check_again(self) -> None:
        """Before something is removed that nobody asked to remove. Raises StorageError."""
        await claim_store(self._store, self._ours)
        self._is_ours = True
