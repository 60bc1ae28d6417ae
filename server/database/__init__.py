"""The job database: one interface, two engines.

Knows: which engine the settings ask for. Does not know: what the tables mean.
"""

from configs.settings import Settings, SettingsError
from server.database.interface import (
    Connection,
    Database,
    DatabaseError,
    DatabaseUnavailableError,
    DatabaseVersionError,
    JobQueue,
    Listener,
    Row,
    Value,
    Values,
    Watch,
)
from server.database.sqlite import SqliteDatabase
from server.database.statements import Statement, read_statements
from server.files import DataFolder

__all__ = [
    "Connection",
    "Database",
    "DatabaseError",
    "DatabaseUnavailableError",
    "DatabaseVersionError",
    "JobQueue",
    "Listener",
    "Row",
    "SqliteDatabase",
    "Statement",
    "Value",
    "Values",
    "Watch",
    "open_database",
    "read_statements",
]


def open_database(settings: Settings) -> Database:
    """PostgreSQL if ``database_url`` is set, else the SQLite file of the data folder. Nothing is opened yet.

    Raises:
        SettingsError: the packages that PostgreSQL needs are not installed.
    """
    if settings.database_url is None:
        return SqliteDatabase(DataFolder(settings.data_dir).database)
    try:
        from server.database.postgres import PostgresDatabase
    except ImportError as error:
        raise SettingsError(
            f"database_url needs packages that are missing ({error}): pip install 'reelwright[postgres]'"
        ) from error
    return PostgresDatabase(settings.database_url.get_secret_value(), settings.gpus)
