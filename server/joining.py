"""What must hold between this process and those that use the same database and store already.

Knows: whose files lie where nobody else can read them, and whose store it is. Does not know: what is started.
"""

import asyncio
from collections.abc import Sequence

from configs.settings import Settings, variable_name
from server import logs
from server.database import Database, DatabaseError
from server.identity import owner_of
from server.starting import OwnSlot, StartError
from server.storage.marker import StoreTakenError, claim_store
from server.storage.opening import open_objects
from server.storage.store import StorageError
from server.workers import DATA_DIR, Worker, WorkerTable, files_of, starting_report

# A store that is down must not keep a process from starting: what is written or swept later asks it again.
CLAIM_SECONDS = 10.0
_STORE = variable_name("storage_url")


def join(settings: Settings, database: Database, model: str, slot: OwnSlot | None) -> None:
    """Become one of the processes of the database; ``slot`` is None for an API process without a worker.

    Raises:
        StartError: the store is another database's, files would lie where others do not find them, or the
            database does not answer any more.
    """
    try:
        if settings.storage_url is not None:
            asyncio.run(_claim(settings.storage_url, database))
        if database.is_remote:
            _join_workers(settings, database, model, slot)
    except DatabaseError as error:
        raise StartError(f"the database does not answer: {error}") from error


async def _claim(url: str, database: Database) -> None:
    store, owner = open_objects(url, 0), owner_of(database)
    try:
        async with asyncio.timeout(CLAIM_SECONDS):
            await claim_store(store, owner)
    except StoreTakenError as error:
        raise StartError(f"{_STORE}={url}: {error}") from error
    except (StorageError, TimeoutError) as error:
        message = str(error) or f"no answer in {CLAIM_SECONDS:g} seconds"
        logs.get_logger().warning("store_not_checked", url=url, message=message)


def _join_workers(settings: Settings, database: Database, model: str, slot: OwnSlot | None) -> None:
    ours = files_of(settings.storage_url)
    report = None if slot is None else starting_report(slot.name, model, settings.gpus, ours)

    def check(others: Sequence[Worker]) -> None:
        for other in others:
            _check_together(ours, other)

    for other in WorkerTable(database).join(report, check):
        if other.files not in {None, ours}:
            logs.get_logger().warning("other_storage_url", worker=other.name, theirs=other.files, ours=ours)


def _check_together(ours: str, other: Worker) -> None:
    """Raise StartError if what one of both makes could not be served by the other's host."""
    seen = f"a sign of life {other.heartbeat_age_seconds:.0f} seconds ago"
    if other.files == DATA_DIR:
        raise StartError(
            f"the worker {other.name} ({seen}) of this database keeps its files in its own data folder, "
            f"where no other host finds them: set {_STORE} on every host, or stop that worker"
        )
    if other.files is not None and ours == DATA_DIR:
        raise StartError(
            f"without {_STORE} only this host would find the files that it makes, and the worker "
            f"{other.name} ({seen}) of this database puts its own at {other.files}: set {_STORE} to that"
        )
