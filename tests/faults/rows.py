"""The job table as a reader beside the server sees it, with what the API does not tell."""

import json
import sqlite3
from contextlib import closing
from dataclasses import astuple, dataclass
from pathlib import Path

from server.files import DataFolder


@dataclass(frozen=True)
class Row:
    """What the table says of a job."""

    status: str
    stage: str | None
    step: int
    checkpoint_step: int
    attempt: int
    losses: int
    version: int
    error: str | None


def read_rows(data_dir: Path) -> dict[str, Row]:
    """Every job, by id."""
    columns = ", ".join(Row.__dataclass_fields__)
    path = f"file:{DataFolder(data_dir).database}?mode=ro"
    with closing(sqlite3.connect(path, uri=True, timeout=20)) as connection:
        found = connection.execute(f"SELECT id, {columns} FROM jobs").fetchall()
    return {row[0]: Row(*row[1:]) for row in found}


def print_rows(data_dir: str) -> None:
    """Write them as JSON to standard output."""
    print(json.dumps({job_id: astuple(row) for job_id, row in read_rows(Path(data_dir)).items()}))
