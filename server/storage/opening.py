"""Which store the settings name.

Knows: the URL schemes, the extra ``s3``, and what each store can do. Does not know: how a store works.
"""

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from configs.settings import Settings, SettingsError, variable_name
from server.database import Database
from server.files import DataFolder
from server.identity import owner_of
from server.jobs import JobTable
from server.storage.job_files import JobFiles
from server.storage.local import LocalStore
from server.storage.local_files import LocalJobFiles
from server.storage.store import VideoStore

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from server.storage.objects import ObjectVideoStore

# Of one request, its body included; parts and pieces are small.
REQUEST_SECONDS = 30
# A client waits meanwhile; uploads are tried again and again above this.
RETRIES = 3
RETRY_SECONDS = 15
_ENDPOINTS = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT",
    "GOOGLE_BASE_URL",
    "AZURE_STORAGE_ENDPOINT",
)
_URL = variable_name("storage_url")
_LINKS = variable_name("storage_presigned_seconds")


def open_store(settings: Settings, folder: DataFolder) -> VideoStore:
    """The HTTP side's store. Raises SettingsError."""
    if settings.storage_url is None:
        if settings.storage_presigned_seconds:
            raise SettingsError(
                f"{_LINKS}={settings.storage_presigned_seconds} needs {_URL}: a folder has no links"
            )
        return LocalStore(folder)
    return open_objects(settings.storage_url, settings.storage_presigned_seconds)


def open_job_files(settings: Settings, folder: DataFolder, jobs: JobTable, database: Database) -> JobFiles:
    """A supervisor's files; with an object store, ``folder`` is its scratch folder.

    Raises SettingsError, DatabaseError.
    """
    if settings.storage_url is None:
        return LocalJobFiles(folder, jobs, is_shared=settings.database_url is not None)
    store = open_objects(settings.storage_url, settings.storage_presigned_seconds)
    from server.storage.object_files import ObjectJobFiles  # needs the extra

    return ObjectJobFiles(folder, store, jobs, owner_of(database))


def open_objects(url: str, link_seconds: int) -> "ObjectVideoStore":
    """The store behind a URL; nothing is sent to it yet.

    Raises:
        SettingsError: the extra is missing, the URL or the credentials' variables are wrong, or links are
            asked of a store that has none.
    """
    try:
        from server.storage.objects import ObjectVideoStore
    except ImportError as error:
        raise SettingsError(
            f"{_URL}={url} needs the package obstore: pip install 'reelwright[s3]' ({error})"
        ) from error
    store = ObjectVideoStore(_from_url(url), link_seconds)
    if link_seconds and not store.gives_links:
        raise SettingsError(f"{_LINKS}={link_seconds}: {url} has no presigned links; set 0")
    return store


def _from_url(url: str) -> "ObjectStore":
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    try:
        if url.startswith("file:"):
            return from_url(url, mkdir=True, automatic_cleanup=True)
        return from_url(
            url,
            client_options={"timeout": timedelta(seconds=REQUEST_SECONDS), "allow_http": _is_plain_http()},
            retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        )
    except (BaseError, OSError, ValueError) as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())
        raise SettingsError(f"{_URL}={url} cannot be used: {reason}") from error


def _is_plain_http() -> bool:
    """An endpoint that was named with http:// is meant so; nothing else turns encryption off."""
    return any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
