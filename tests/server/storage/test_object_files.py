"""Finished files on their way to a real S3 server: a real supervisor, a scripted worker process."""

import asyncio
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from configs.model_preset import ModelPreset
from server import worker_handle
from server.claims import Claim, ClaimTable
from server.storage import object_files
from tests.server.running_supervisor import RunningSupervisor
from tests.server.scripted_worker import BIG_BYTES, JPEG, run_script
from tests.server.storage.bucket import URL, Bucket
from tests.server.storage.flaky_proxy import FlakyProxy

Start = Callable[..., AbstractContextManager[RunningSupervisor]]


@pytest.fixture
def proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyProxy]:
    """Between the supervisor and the bucket."""
    with FlakyProxy(bucket.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


@pytest.fixture
def supervised(
    tmp_path: Path, preset: ModelPreset, proxy: FlakyProxy, monkeypatch: pytest.MonkeyPatch
) -> Start:
    """Start a supervisor whose workers follow scripts, and whose files go to the bucket."""
    monkeypatch.setattr(worker_handle, "run_worker", run_script)
    return lambda **settings: RunningSupervisor(tmp_path / "data", preset, storage_url=URL, **settings)


def results(job_id: str, attempt: int = 1) -> list[str]:
    """The objects of a completed scripted job."""
    return [f"videos/{job_id}/{attempt}.{ending}" for ending in ("mp4", "thumbnail.jpg")]


def start_held(running: RunningSupervisor, proxy: FlakyProxy, deadline_seconds: float | None = None) -> str:
    """A finished job whose video does not get to the store."""
    proxy.hold("1.mp4")
    job_id = running.submit("finish", deadline_seconds=deadline_seconds)
    running.wait_for(proxy.is_holding.is_set)
    assert (running.job(job_id).status, running.job(job_id).stage) == ("in_progress", "store")
    return job_id


def test_finished_files_lie_in_the_store_and_nothing_else(supervised: Start, bucket: Bucket) -> None:
    with supervised() as running:
        job_id = running.submit("denoise preview checkpoint step until:a finish")
        running.wait_for(lambda: running.job(job_id).preview_step == 1)
        assert asyncio.run(bucket.store().preview(job_id, 1)) == JPEG
        running.wait_for(lambda: f"videos/{job_id}/1.checkpoint.safetensors" in bucket.names())
        running.let("a")
        assert running.wait_for_job(job_id).status == "completed"
        assert bucket.read(f"videos/{job_id}/1.mp4").content == b"whole"
        running.wait_for(lambda: bucket.names() == results(job_id))
        running.wait_for(lambda: running.files_of(job_id) == [])


def test_a_store_that_fails_every_third_request_loses_nothing(
    supervised: Start, bucket: Bucket, proxy: FlakyProxy
) -> None:
    proxy.is_flaky = True
    with supervised() as running:
        jobs = [running.submit("denoise preview checkpoint release finish") for _ in range(5)]
        jobs.append(running.submit("denoise big release finish"))
        done = [running.wait_for_job(job_id) for job_id in jobs]
        assert [(job.status, job.attempt, job.losses) for job in done] == [("completed", 1, 0)] * 6
        for job in done:
            assert job.result is not None
            content = bucket.read(f"videos/{job.id}/1.mp4").content
            assert hashlib.sha256(content).hexdigest() == job.result.file.sha256
        assert len(content) == BIG_BYTES
        proxy.is_flaky = False
        running.wait_for(lambda: not any(running.files_of(job_id) for job_id in jobs))
    assert proxy.failed >= 6
    assert {name for job_id in jobs for name in results(job_id)} <= {*bucket.names()}


def test_an_upload_holds_up_neither_device_nor_worker(supervised: Start, proxy: FlakyProxy) -> None:
    with supervised() as running:
        first = start_held(running, proxy)
        before = running.worker_pid()
        os.kill(before, signal.SIGKILL)
        running.wait_for(lambda: running.worker().is_ready and running.worker_pid() != before)
        computing = running.submit("denoise step")
        running.wait_for(lambda: running.job(computing).step == 1)
        assert running.job(first).stage == "store"
        proxy.release()
        done = running.wait_for_job(first)
        assert (done.status, done.attempt, done.losses) == ("completed", 1, 0)


@pytest.mark.parametrize("how", ["cancelled", "deleted", "failed"])
def test_an_upload_ends_with_its_job(supervised: Start, bucket: Bucket, proxy: FlakyProxy, how: str) -> None:
    with supervised() as running:
        job_id = start_held(running, proxy, deadline_seconds=2.0 if how == "failed" else None)
        if how == "cancelled":
            running.jobs.cancel(job_id)
        elif how == "deleted":
            running.jobs.delete(job_id)
        running.wake()
        if how == "deleted":
            running.wait_for(lambda: running.files_of(job_id) == [])
        else:
            assert running.wait_for_job(job_id).status == how
        proxy.release()
        # The request that was held has its effect now, and what it left goes after it.
        running.wait_for(lambda: bucket.names() == [] and running.files_of(job_id) == [])
        assert running.wait_for_job(running.submit("finish")).status == "completed"


def test_a_lost_attempt_leaves_nothing(supervised: Start, bucket: Bucket, proxy: FlakyProxy) -> None:
    with supervised() as running:
        job_id = start_held(running, proxy)
        ClaimTable(running.database).requeue(Claim(job_id, 1))
        running.wake()
        done = running.wait_for_job(job_id)
        assert (done.status, done.attempt) == ("completed", 2)
        proxy.release()
        running.wait_for(lambda: bucket.names() == results(job_id, attempt=2))


def test_a_finished_job_is_not_computed_again_after_a_restart(
    supervised: Start, bucket: Bucket, proxy: FlakyProxy
) -> None:
    with supervised() as running:
        job_id = start_held(running, proxy)
    assert running.files_of(job_id) == ["1.mp4", "1.result.json", "1.thumbnail.jpg"]
    with supervised() as again:
        assert again.job(job_id).stage == "store"
        proxy.release()
        done = again.wait_for_job(job_id)
        assert (done.status, done.attempt, done.losses) == ("completed", 1, 0)
        again.wait_for(lambda: again.files_of(job_id) == [])
        again.wait_for(lambda: bucket.names() == results(job_id))


def test_a_file_that_changed_before_it_was_stored_fails_its_job(supervised: Start, proxy: FlakyProxy) -> None:
    with supervised() as running:
        job_id = start_held(running, proxy)
    (running.files.videos / job_id / "1.mp4").write_bytes(b"WHOLE")
    proxy.release()
    with supervised() as again:
        failed = again.wait_for_job(job_id)
        assert failed.error is not None
        assert (failed.error.code, failed.status) == ("internal", "failed")
        assert "has changed since it was written" in failed.error.message


@pytest.mark.parametrize(("is_other_host", "found"), [(True, b"from afar"), (False, b"latents")])
def test_a_job_goes_on_from_its_newest_checkpoint(
    supervised: Start, bucket: Bucket, is_other_host: bool, found: bytes
) -> None:
    with supervised() as running:
        job_id = running.submit("resumed denoise step checkpoint until:a finish")
        name = f"videos/{job_id}/1.checkpoint.safetensors"
        running.wait_for(lambda: running.job(job_id).checkpoint_step == 1 and name in bucket.names())
    bucket.write(name, b"from afar")
    if is_other_host:
        running.files.remove(job_id)
    with supervised() as again:
        again.let("a")
        done = again.wait_for_job(job_id)
        assert (done.status, done.attempt) == ("completed", 2)
        assert bucket.read(f"videos/{job_id}/2.mp4").content == b"after " + found
        again.wait_for(lambda: bucket.names() == results(job_id, attempt=2))


def test_without_the_store_a_job_begins_again(
    supervised: Start, bucket: Bucket, proxy: FlakyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files, "FETCH_SECONDS", 0.5)
    with supervised() as running:
        job_id = running.submit("resumed denoise step checkpoint until:a finish")
        running.wait_for(lambda: running.job(job_id).checkpoint_step == 1)
    running.files.remove(job_id)
    proxy.hold("list-type")
    with supervised() as again:
        again.let("a")
        again.wait_for(lambda: again.job(job_id).step == 1)
        assert again.job(job_id).attempt == 2
        proxy.release()
        assert again.wait_for_job(job_id).status == "completed"
        assert bucket.read(f"videos/{job_id}/2.mp4").content == b"after nothing"


def test_no_job_starts_while_too_many_wait_for_the_store(
    supervised: Start, proxy: FlakyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files, "MOST_WAITING", 1)
    with supervised() as running:
        first = start_held(running, proxy)
        second = running.submit("finish")
        running.wait_for(lambda: running.jobs.queue(running.job(second).model) != {})
        assert running.job(second).status == "queued"
        proxy.release()
        assert running.wait_for_job(second).status == "completed"
        assert running.job(first).status == "completed"


def test_expired_jobs_go_with_their_objects(supervised: Start, bucket: Bucket) -> None:
    with supervised(retention_seconds=0.5) as running:
        job_id = running.submit("finish")
        running.wait_for(lambda: running.jobs.find(job_id) is None)
        running.wait_for(lambda: bucket.names() == [])


def test_a_start_clears_the_scratch_folder(supervised: Start) -> None:
    with supervised() as running:
        waiting = running.submit("denoise step checkpoint until:a")
        running.wait_for(lambda: running.job(waiting).checkpoint_step == 1)
        done = running.submit("finish")
    unknown = "video_" + "0" * 32
    for job_id in (waiting, unknown):
        folder = running.files.videos / job_id
        folder.mkdir(exist_ok=True)
        (folder / "1.mp4").write_bytes(b"what a killed worker left")
        (folder / ".1.0a1b.tmp.mp4").write_bytes(b"half")
    with supervised() as again:
        again.wait_for(lambda: again.job(waiting).attempt == 2 and again.job(waiting).step == 1)
        assert again.files_of(unknown) == []
        assert again.files_of(waiting) == ["2.checkpoint.safetensors"]
        assert again.job(done).status == "queued"
