"""Look-ups that many event streams share."""

import asyncio

from server.claims import ClaimTable
from server.database import Database
from server.feed import ChangeFeed
from server.jobs import JobTable
from server.present import Presenter
from server.snapshots import Snapshots
from server.workers import WorkerTable
from tests.server.samples import new_job


async def follow(database: Database) -> None:
    """Submit, claim and delete a job, looking after each change."""
    jobs, claims, feed = JobTable(database), ClaimTable(database), ChangeFeed(database)
    snapshots = Snapshots(database, jobs, Presenter(jobs, WorkerTable(database)), feed)
    feed.start()
    await feed.next_change().wait()
    job_id = jobs.submit(new_job()).job.id
    await feed.next_change().wait()
    queued = await snapshots.get(job_id)
    assert queued is not None
    assert (queued.video.status, queued.video.queue_position) == ("queued", 1)
    assert await snapshots.get(job_id) is queued

    change = feed.next_change()
    claims.claim("tiny-wan")
    await change.wait()
    running = await snapshots.get(job_id)
    assert running is not None
    assert (running.video.status, running.job.version) == ("in_progress", 2)

    change = feed.next_change()
    jobs.delete(job_id)
    await change.wait()
    assert await snapshots.get(job_id) is None

    change = feed.next_change()
    feed.close()
    assert change.is_set()
    assert feed.is_closed


def test_a_change_makes_them_look_again(database: Database) -> None:
    asyncio.run(follow(database))
