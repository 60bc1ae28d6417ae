"""What a sweep of the store removes, and what it leaves."""

import asyncio
from pathlib import Path

import pytest

from server.claims import Claim, ClaimTable
from server.files import DataFolder
from server.job import JobError
from server.jobs import JobTable
from server.storage.keys import ENDINGS
from server.storage.local_files import LocalJobFiles
from server.storage.outbox import write_record
from server.storage.sweep import sweep_objects, sweep_scratch, tidy_scratch
from tests.server.samples import UNKNOWN_ID, new_job, result
from tests.server.storage.bucket import Bucket

LATER = 3600.0


def claimed(jobs: JobTable, claims: ClaimTable) -> Claim:
    """A job in progress."""
    jobs.submit(new_job())
    job = claims.claim("tiny-wan")
    assert job is not None
    return Claim(job.id, job.attempt)


def everything_of(job_id: str, attempt: int) -> list[str]:
    """All that an attempt can leave."""
    return [f"videos/{job_id}/{attempt}{ending}" for ending in ENDINGS.values()]


def left_of(bucket: Bucket, job_id: str) -> list[str]:
    """Names of a job's objects, without the folder."""
    folder = f"videos/{job_id}/"
    return [name.removeprefix(folder) for name in bucket.names() if name.startswith(folder)]


def sweep(bucket: Bucket, jobs: JobTable, grace_seconds: float = 0.0) -> list[str]:
    """Sweep once."""
    return asyncio.run(sweep_objects(bucket.store(), jobs, grace_seconds))


def test_only_what_a_row_has_a_use_for_stays(bucket: Bucket, jobs: JobTable, claims: ClaimTable) -> None:
    completed, failed = claimed(jobs, claims), claimed(jobs, claims)
    claims.complete(completed, result())
    claims.fail(failed, JobError("internal", "broken", retryable=False))
    lost = claimed(jobs, claims)
    claims.requeue(lost)
    running = claims.claim("tiny-wan")
    assert running is not None
    assert (running.id, running.attempt) == (lost.job_id, 2)
    every = [
        name
        for job_id in (completed.job_id, failed.job_id, running.id, UNKNOWN_ID)
        for attempt in (1, 2)
        for name in everything_of(job_id, attempt)
    ]
    foreign = ["videos/readme.txt", f"videos/{UNKNOWN_ID}/1.txt", "other/1.mp4"]
    for name in [*every, *foreign]:
        bucket.write(name, b"1")
    removed = sweep(bucket, jobs)
    assert left_of(bucket, completed.job_id) == ["1.mp4", "1.spritesheet.jpg", "1.thumbnail.jpg"]
    assert left_of(bucket, failed.job_id) == []
    assert left_of(bucket, running.id) == sorted(
        ["1.checkpoint.safetensors", *(f"2{ending}" for ending in ENDINGS.values())]
    )
    assert left_of(bucket, UNKNOWN_ID) == ["1.txt"]
    assert {*foreign} <= {*bucket.names()}
    assert {*removed} == {*every} - {*bucket.names()}
    assert sweep(bucket, jobs) == []


def test_what_is_young_stays(bucket: Bucket, jobs: JobTable, claims: ClaimTable) -> None:
    claim = claimed(jobs, claims)
    names = sorted([*everything_of(UNKNOWN_ID, 1), *everything_of(claim.job_id, 1)])
    for name in names:
        bucket.write(name, b"1")
    assert sweep(bucket, jobs, grace_seconds=LATER) == []
    assert bucket.names() == names


def test_another_databases_store_is_left_alone(
    bucket: Bucket, jobs: JobTable, capsys: pytest.CaptureFixture[str]
) -> None:
    names = sorted(everything_of(UNKNOWN_ID, 1))
    for name in names:
        bucket.write(name, b"1")
    assert sweep(bucket, jobs) == []
    assert bucket.names() == names
    assert "sweep_refused" in capsys.readouterr().out


def test_scratch_folders_of_jobs_that_ended_elsewhere_go(
    tmp_path_factory: pytest.TempPathFactory, jobs: JobTable, claims: ClaimTable
) -> None:
    folder = DataFolder(tmp_path_factory.mktemp("scratch"))
    folder.create()
    held, running, ended = (claimed(jobs, claims) for _ in range(3))
    claims.complete(held, result())
    claims.requeue(ended)
    elsewhere = claims.claim("tiny-wan")
    assert elsewhere is not None
    claims.complete(Claim(elsewhere.id, elsewhere.attempt), result())
    for job_id in (held.job_id, running.job_id, ended.job_id, UNKNOWN_ID):
        folder.prepare(job_id, 1).video.write_bytes(b"1")
    removed = sweep_scratch(folder, {held.job_id}, jobs)
    assert {*folder.job_ids()} == {held.job_id, running.job_id}
    assert len(removed) == 2


def test_videos_that_were_made_without_a_store_stay(
    tmp_path_factory: pytest.TempPathFactory, jobs: JobTable, claims: ClaimTable
) -> None:
    """The data folder becomes a scratch folder when storage_url is set; they are nowhere else yet."""
    folder = DataFolder(tmp_path_factory.mktemp("data"))
    folder.create()
    before, uploaded = (claimed(jobs, claims) for _ in range(2))
    for claim in (before, uploaded):
        claims.complete(claim, result())
        video = folder.prepare(claim.job_id, 1).video
        for name in ("1.mp4", "1.thumbnail.jpg", "1.spritesheet.jpg", "1.checkpoint.safetensors"):
            video.with_name(name).write_bytes(b"1")
    write_record(folder.video(uploaded.job_id, 1), result())
    sweep_scratch(folder, {uploaded.job_id}, jobs)
    tidy_scratch(folder, [], jobs)
    assert folder.job_ids() == [before.job_id]
    left = {path.name for path in folder.entries(before.job_id)}
    assert left == {"1.mp4", "1.thumbnail.jpg", "1.spritesheet.jpg"}


def test_a_folder_of_another_databases_jobs_is_left_alone(
    jobs: JobTable, claims: ClaimTable, tmp_path: Path
) -> None:
    folder = DataFolder(tmp_path)
    folder.create()
    stranger = folder.prepare(UNKNOWN_ID, 1).video
    stranger.write_bytes(b"1")
    files = LocalJobFiles(folder, jobs, is_shared=True)
    tidy_scratch(folder, [], jobs)
    files.tidy([])
    assert stranger.exists()
    known = claimed(jobs, claims)
    folder.prepare(known.job_id, 1)
    files.tidy([])
    assert not stranger.exists()
