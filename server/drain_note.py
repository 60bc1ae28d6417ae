"""What a slot held when it was told to stop and the database was away: nobody could be told.

Knows: the file in the data folder. Does not know: what the next start of the slot makes of it. A note that
cannot be written is none: then the jobs count as lost.
"""

import json
import os
import secrets
from collections.abc import Collection

from server import logs
from server.claims import Claim
from server.files import DataFolder


def write_note(folder: DataFolder, claims: Collection[Claim]) -> None:
    """These attempts were ended in order."""
    temporary = folder.drain_note.with_name(f".drained.{secrets.token_hex(4)}.tmp.json")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump([[claim.job_id, claim.attempt] for claim in claims], file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder.drain_note)
    except OSError as error:
        logs.get_logger().warning("drain_note_not_written", message=str(error))


def read_note(folder: DataFolder) -> set[Claim]:
    """The attempts of the note, if there is one."""
    try:
        entries = json.loads(folder.drain_note.read_bytes())
        return {Claim(str(job_id), int(attempt)) for job_id, attempt in entries}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, TypeError) as error:
        logs.get_logger().warning("drain_note_unusable", message=str(error))
        return set()


def remove_note(folder: DataFolder) -> None:
    """It has been read, or the database could be told after all."""
    try:
        folder.drain_note.unlink(missing_ok=True)
    except OSError as error:
        logs.get_logger().warning("drain_note_not_removed", message=str(error))
