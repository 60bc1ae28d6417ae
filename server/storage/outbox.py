"""Finished files that wait for the store: the result as JSON beside the MP4.

Knows: that a record must survive a power cut. Does not know: stores. A record is written when all files of
the attempt are whole, and goes with the job's scratch folder.
"""

import os
import secrets
from pathlib import Path

from pydantic import ValidationError

from configs.job import JobResult
from server import logs

ENDING = ".result.json"


def record_of(video: Path) -> Path:
    """Where the record of an attempt lies, by its MP4: ``2.result.json`` beside ``2.mp4``."""
    return video.with_name(video.stem + ENDING)


def write_record(video: Path, result: JobResult) -> None:
    """Write the record; the caller syncs the folder. Raises OSError."""
    path = record_of(video)
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.tmp.json")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(result.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_record(video: Path) -> JobResult | None:
    """The result, if there is a record and the MP4 has the size that it names."""
    path = record_of(video)
    try:
        result = JobResult.model_validate_json(path.read_bytes())
        return result if video.stat().st_size == result.file.bytes else None
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        logs.get_logger().warning("outbox_record_unusable", path=str(path), message=str(error))
        return None
