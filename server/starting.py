"""What a server and a worker need before they start: the database's tables, and a data folder for themselves.

Knows: how to say in one line why they cannot be had. Does not know: what is started then.
"""

from dataclasses import dataclass

from configs.settings import Settings
from server.database import Database, DatabaseError, DatabaseVersionError, open_database
from server.files import DataFolder
from server.lock import DataFolderInUseError, FolderLock, acquire
from server.slot_name import slot_name


class StartError(RuntimeError):
    """The process cannot start; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class OwnSlot:
    """A worker slot that belongs to this process while it holds the lock."""

    name: str
    lock: FolderLock


def open_slot(settings: Settings, folder: DataFolder) -> OwnSlot:
    """Make the data folder, if need be, and take it. Raises StartError."""
    _check_database_of(settings, folder)
    try:
        folder.create()
        lock = acquire(folder.lock)
        return OwnSlot(slot_name(settings, folder), lock)
    except DataFolderInUseError as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise StartError(f"data folder {folder.root} cannot be used: {error}") from error


def _check_database_of(settings: Settings, folder: DataFolder) -> None:
    """A start removes the videos that its database does not know, so it must be theirs. Raises StartError."""
    if settings.database_url is not None and folder.database.exists():
        found, other = "has the jobs and videos of a server without database_url", "with it"
    elif settings.database_url is None and folder.worker_name.exists():
        found, other = "belongs to a database_url", "without it"
    else:
        return
    raise StartError(f"data folder {folder.root} {found}; {other}, choose another data_dir")


def migrated_database(settings: Settings) -> Database:
    """The job database, with this version's tables. Raises StartError."""
    database = open_database(settings)
    try:
        database.migrate()
    except DatabaseVersionError as error:
        raise StartError(str(error)) from error
    except (OSError, DatabaseError) as error:
        shown = (
            "database_url" if settings.database_url else f"data folder {DataFolder(settings.data_dir).root}"
        )
        raise StartError(f"{shown} cannot be used: {error}") from error
    return database
