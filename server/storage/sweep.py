"""Finds files that no job knows: left by a killed process, or by a removal that failed.

Knows: which files belong to a row. Does not know: when to look. Several processes may sweep at once: an
object goes only when it is older than a grace time and its job, looked up just before, has no use for it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path

from server import logs
from server.claims import Claim
from server.files import DataFolder
from server.job import Job
from server.jobs import JobTable
from server.storage.keys import FOLDER, RESULT_KINDS, ObjectKey
from server.storage.local_files import knows_any
from server.storage.objects import ObjectVideoStore
from server.storage.outbox import record_of


def is_wanted(key: ObjectKey, job: Job | None) -> bool:
    """Whether a job (None: there is no such job) has a use for an object."""
    if job is None or job.status in {"failed", "cancelled"}:
        return False
    if job.status == "completed":
        return key.attempt == job.attempt and key.kind in RESULT_KINDS
    return key.attempt == job.attempt or key.kind == "checkpoint"


async def sweep_objects(store: ObjectVideoStore, jobs: JobTable, grace_seconds: float) -> list[str]:
    """Remove old objects that nobody wants; returns their names.

    A store in which there are jobs' objects and none of a job that the table knows is left alone: rather than
    that all jobs are gone, the database is another one's, or new.

    Raises:
        StorageError, and what the table raises; what was not looked at by then stays.
    """
    youngest = datetime.now(UTC) - timedelta(seconds=grace_seconds)
    found: defaultdict[str, list[ObjectKey]] = defaultdict(list)
    async for entry in store.all_objects():
        key = ObjectKey.parse(entry.name)
        if key is not None:
            found[key.job_id] += [key] if entry.modified_at <= youngest else []
    if found and not await asyncio.to_thread(knows_any, jobs, found):
        logs.get_logger().warning("sweep_refused", message="no object belongs to a job of this database")
        return []
    removed = []
    for job_id, keys in found.items():
        job = await asyncio.to_thread(jobs.find, job_id) if keys else None
        names = [str(key) for key in keys if not is_wanted(key, job)]
        if names:
            await store.delete(names)
            removed += names
    return removed


def _made_before_the_store(folder: DataFolder, job: Job | None) -> set[Path]:
    """The files of a job that was completed without a store; they may be in none."""
    if job is None or job.status != "completed":
        return set()
    video = folder.video(job.id, job.attempt)
    if record_of(video).exists():  # it was on its way to the store, and the row says that it is there
        return set()
    return {video, folder.thumbnail(job.id, job.attempt), folder.spritesheet(job.id, job.attempt)}


def sweep_scratch(folder: DataFolder, held: Collection[str], jobs: JobTable) -> list[str]:
    """Remove the scratch files of jobs that have ended elsewhere; those of jobs in ``held`` are still in use.

    A completed job's files stay if this was no scratch folder when they were made. Returns what was removed.
    """
    removed: list[Path] = []
    for job_id in folder.job_ids():
        job = jobs.find(job_id)
        if job_id not in held and (job is None or job.is_final):
            removed += folder.keep_only(job_id, _made_before_the_store(folder, job))
    return [str(path) for path in removed]


def tidy_scratch(folder: DataFolder, kept: Collection[Claim], jobs: JobTable) -> None:
    """Remove all that is neither an attempt's in ``kept`` nor a checkpoint of a job that goes on.

    A completed job's files stay if this was no scratch folder when they were made. Nobody may write there.
    """
    if (job_ids := folder.job_ids()) and not knows_any(jobs, job_ids):
        logs.get_logger().warning("tidy_refused", message="no file belongs to a job of this database")
        return
    for job_id in job_ids:
        job = jobs.find(job_id)
        attempts = {claim.attempt for claim in kept if claim.job_id == job_id}
        goes_on = job is not None and not job.is_final
        known = _made_before_the_store(folder, job)
        for path in folder.entries(job_id):
            key = ObjectKey.parse(f"{FOLDER}/{job_id}/{path.name}")
            is_checkpoint = key is not None and key.kind == "checkpoint"
            if path.name.partition(".")[0] in {str(attempt) for attempt in attempts} or (
                goes_on and is_checkpoint
            ):
                known.add(path)
        for path in folder.keep_only(job_id, known):
            logs.get_logger().info("file_removed", path=str(path))
