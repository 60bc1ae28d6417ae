"""Which database this is, and when it was last away.

Knows: the one row that says so; it goes along into a dump. Does not know: who asks, or what follows from it.
"""

from dataclasses import dataclass

from server.database import Connection, Database, read_statements

_SQL = read_statements("identity.sql")

SEE_SECONDS = 5.0
GAP_SECONDS = 2 * SEE_SECONDS


@dataclass(frozen=True, slots=True)
class Owner:
    """A database as others know it: ``id`` was drawn when its tables were made, ``name`` is for people."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class AwayTime:
    """When nobody wrote that the database answers; seconds since 1970 by its own clock."""

    start: float
    end: float


def owner_of(database: Database) -> Owner:
    """Raises DatabaseError."""
    with database.read() as connection:
        row = connection.one(_SQL["id"])
    assert row is not None
    return Owner(row["id"], database.name)


def see(database: Database) -> None:
    """Write that it answers, which is to be done every ``SEE_SECONDS`` by anybody. Raises DatabaseError."""
    with database.write() as connection:
        connection.run(_SQL["see"], {"now": connection.now(), "gap_seconds": GAP_SECONDS})


def last_away(connection: Connection) -> AwayTime | None:
    """The last outage that shows; None: there was none."""
    row = connection.one(_SQL["outage"])
    return None if row is None else AwayTime(row["away_from"], row["away_until"])
