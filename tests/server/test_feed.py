"""Changes of the job database."""

import asyncio
from pathlib import Path

from server.database import SqliteDatabase
from server.feed import ChangeFeed
from server.observations import JOBS_TOTAL, count


async def outlive_a_failure(path: Path) -> None:
    """Poll a database that cannot be opened until it can, then change it."""
    feed = ChangeFeed(SqliteDatabase(path))
    feed.start()
    for _ in range(2):  # while nothing is known, streams are told to look
        await asyncio.wait_for(feed.next_change().wait(), 30)
    path.parent.mkdir()
    database = SqliteDatabase(path)
    database.migrate()
    for number in range(3):
        change = feed.next_change()
        with database.write() as connection:
            count(connection, JOBS_TOTAL, str(number), "completed")
        await asyncio.wait_for(change.wait(), 30)
    feed.close()
    database.close()


def test_a_database_that_fails_for_a_while_stops_no_stream(tmp_path: Path) -> None:
    asyncio.run(outlive_a_failure(tmp_path / "later" / "jobs.sqlite3"))
