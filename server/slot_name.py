"""The name of a worker slot, as the job table has it.

Knows: that a slot is a data folder: whoever holds its lock is the slot. Does not know: what the slot does.
"""

import re
import secrets
import socket

from configs.settings import Settings
from server.files import DataFolder
from server.workers import LOCAL_SLOT

_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")
_LONGEST_HOST = 60


def slot_name(settings: Settings, folder: DataFolder) -> str:
    """``local`` with SQLite, which has one slot; else the name that the data folder got at its first use.

    Host name and a random part: a restart finds its own claims again, and two folders of one host, or of
    containers that believe to be the same host, differ. To be asked with the folder's lock. Raises OSError.
    """
    if settings.database_url is None:
        return LOCAL_SLOT
    try:
        known = folder.worker_name.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        known = ""
    return known if _NAME.fullmatch(known) else _new_name(folder)


def _new_name(folder: DataFolder) -> str:
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:_LONGEST_HOST]
    name = f"{host}-{secrets.token_hex(4)}"
    temporary = folder.worker_name.with_name(".worker_name.tmp")
    temporary.write_text(f"{name}\n", encoding="utf-8")
    temporary.replace(folder.worker_name)
    return name
