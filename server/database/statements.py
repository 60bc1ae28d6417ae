"""Named SQL statements, in the words of each engine.

Knows: the files in sql/ and the few words that differ. Does not know: connections.

The files hold SQL that both engines read. Where they cannot agree a statement stands twice, under
``-- name: due (sqlite)`` and ``-- name: due (postgres)``.
"""

import re
from dataclasses import dataclass
from pathlib import Path

SQL_FOLDER = Path(__file__).parents[1] / "sql"
_HEADER = re.compile(r"^-- name: (\w+)(?: \((sqlite|postgres)\))?\n", re.MULTILINE)
_COMMENT = re.compile(r"^\s*--.*\n", re.MULTILINE)
_NULL_SAFE = re.compile(r"(\w+) IS :(\w+)")
_PARAMETER = re.compile(r"(?<![:\w]):(\w+)")


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement for each engine, with its own marks for parameters."""

    sqlite: str
    postgres: str


def read_statements(file_name: str) -> dict[str, Statement]:
    """The statements of one file in sql/, by the name in the comment line above each."""
    parts = _HEADER.split((SQL_FOLDER / file_name).read_text(encoding="utf-8"))
    found: dict[str, dict[str, str]] = {}
    for name, engine, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        texts = found.setdefault(name, {})
        for each in (engine,) if engine else ("sqlite", "postgres"):
            texts[each] = _COMMENT.sub("", body).strip().rstrip(";")
    return {name: Statement(texts["sqlite"], in_postgres(texts["postgres"])) for name, texts in found.items()}


def in_postgres(text: str) -> str:
    """The same statement with psycopg's parameters.

    ``column IS :value`` holds for two NULLs, too; PostgreSQL's own words for that use no index.
    """
    text = text.replace("%", "%%")
    text = _NULL_SAFE.sub(r"(\1 = :\2 OR (\1 IS NULL AND CAST(:\2 AS TEXT) IS NULL))", text)
    return _PARAMETER.sub(r"%(\1)s", text)


def migration_scripts(engine: str) -> list[Path]:
    """What brings an engine's tables up to date, in order: the first makes version 1."""
    return sorted((SQL_FOLDER / engine).glob("[0-9][0-9][0-9]_*.sql"))
