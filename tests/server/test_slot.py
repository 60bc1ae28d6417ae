"""Two jobs in one worker's hands, and what becomes of them: a real supervisor, a scripted worker process."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from configs.model_preset import ModelPreset
from server import running_job, worker_handle
from server.job import Job
from tests.server.running_supervisor import RunningSupervisor
from tests.server.scripted_worker import JPEG, MEMORY_BYTES, run_script

Start = Callable[..., AbstractContextManager[RunningSupervisor]]


@pytest.fixture
def supervised(tmp_path: Path, preset: ModelPreset, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a supervisor whose workers follow scripts."""
    monkeypatch.setattr(worker_handle, "run_worker", run_script)
    return lambda **settings: RunningSupervisor(tmp_path / "data", preset, **settings)


def code_of(job: Job) -> str | None:
    """Why the job failed."""
    return job.error.code if job.error else None


def test_the_next_job_starts_when_the_device_is_released(supervised: Start) -> None:
    with supervised() as running:
        first = running.submit("denoise step release until:a finish")
        second = running.submit("denoise step release until:b finish")
        third = running.submit("denoise finish")
        running.wait_for(lambda: running.job(second).step == 1)
        assert running.job(first).status == "in_progress"
        # Two jobs write their files now: a third one waits, whatever the device does.
        running.wake()
        time.sleep(0.3)
        assert running.job(third).status == "queued"
        running.let("b")
        assert running.wait_for_job(second).status == "completed"
        assert running.wait_for_job(third).status == "completed"
        assert running.job(first).status == "in_progress"
        running.let("a")
        assert running.wait_for_job(first).status == "completed"
        assert running.files_of(first) == ["1.mp4", "1.thumbnail.jpg"]
        running.wait_for(lambda: running.worker().memory_in_use_bytes == {"cpu": 1234})
        assert running.worker().memory_total_bytes == MEMORY_BYTES


def test_a_job_holds_the_device_until_it_releases_it(supervised: Start) -> None:
    with supervised() as running:
        first = running.submit("denoise step until:a finish")
        second = running.submit("finish")
        running.wait_for(lambda: running.job(first).step == 1)
        running.wake()
        time.sleep(0.3)
        assert running.job(second).status == "queued"
        running.let("a")
        assert running.wait_for_job(second).status == "completed"


def test_the_next_job_is_named_once_and_claimed_by_priority(supervised: Start) -> None:
    with supervised() as running:
        running.submit("denoise until:a release finish")
        ahead = running.files.root / "ahead.txt"
        time.sleep(0.1)
        low = running.submit("until:b release finish")
        running.wait_for(ahead.exists)
        high = running.submit("finish", priority=5)
        running.let("a")
        assert running.wait_for_job(high).status == "completed"
        assert running.job(low).status != "completed"
        running.let("b")
        running.wait_for_job(low)
        # Named while the first ran, and again while the urgent one did: both times it came next.
        assert set(ahead.read_text().splitlines()) == {"until:b release finish"}
        assert 1 <= len(ahead.read_text().splitlines()) <= 2


def test_cancel_and_delete_reach_either_job(supervised: Start) -> None:
    with supervised() as running:
        writing = running.submit("denoise release")
        computing = running.submit("denoise step")
        running.wait_for(lambda: running.job(computing).step == 1)
        running.jobs.cancel(writing)
        running.wake()
        assert running.wait_for_job(writing).status == "cancelled"
        assert running.job(computing).status == "in_progress"
        running.jobs.delete(computing)
        running.wake()
        assert running.wait_for_job(running.submit("finish")).status == "completed"
        assert running.files_of(computing) == []


def test_a_death_takes_both_jobs_and_each_runs_again_alone(supervised: Start) -> None:
    with supervised() as running:
        writing = running.submit("denoise checkpoint release until:a finish")
        computing = running.submit("denoise step release until:b finish")
        running.wait_for(lambda: running.job(computing).step == 1)
        assert running.files_of(writing) == ["checkpoint.safetensors"]
        os.kill(running.worker_pid(), signal.SIGKILL)
        running.wait_for(lambda: running.job(writing).attempt == 2)
        running.wait_for(lambda: running.job(writing).stage == "denoise")
        assert (running.job(writing).losses, running.job(computing).losses) == (1, 1)
        time.sleep(0.3)
        assert running.job(computing).status == "queued"  # the device is free, but each is watched by itself
        running.let("a")
        running.let("b")
        assert running.wait_for_job(writing).status == "completed"
        assert running.wait_for_job(computing).status == "completed"
        assert running.files_of(writing) == ["2.mp4", "2.thumbnail.jpg"]


def test_a_job_that_kills_twice_is_lost_and_harms_no_other(supervised: Start) -> None:
    with supervised() as running:
        innocent = running.submit("denoise release until:a finish")
        deadly = running.submit("denoise step checkpoint die")
        running.wait_for(lambda: running.job(innocent).attempt == 2)
        running.let("a")
        assert running.wait_for_job(innocent).status == "completed"
        lost = running.wait_for_job(deadly)
        assert (lost.status, lost.attempt) == ("failed", 2)
        assert code_of(lost) == "worker_lost"
        assert running.files_of(deadly) == []


def test_a_job_that_does_not_stop_is_ended_with_its_worker(
    supervised: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_job, "CANCEL_GRACE_SECONDS", 0.5)
    with supervised() as running:
        writing = running.submit("denoise checkpoint release until:a finish")
        stubborn = running.submit("denoise step stubborn")
        running.wait_for(lambda: running.job(stubborn).step == 1)
        running.jobs.cancel(stubborn)
        running.wake()
        assert running.wait_for_job(stubborn).status == "cancelled"
        running.let("a")
        done = running.wait_for_job(writing)
        assert (done.status, done.attempt, done.losses) == ("completed", 2, 0)  # no loss of its own


@pytest.mark.parametrize("script", ["denoise step checkpoint", "denoise step checkpoint stubborn"])
def test_a_job_that_runs_too_long_fails(
    supervised: Start, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_job, "CANCEL_GRACE_SECONDS", 0.5)
    with supervised() as running:
        waiting = running.submit("denoise until:a finish", deadline_seconds=1000.0)
        late = running.submit(script, deadline_seconds=0.5)
        time.sleep(0.6)  # in the queue, which does not count
        running.let("a")
        assert running.wait_for_job(waiting).status == "completed"
        running.wait_for(lambda: running.job(late).step == 1)
        failed = running.wait_for_job(late)
        assert failed.status == "failed"
        assert failed.error is not None
        assert (failed.error.code, failed.error.retryable) == ("deadline_exceeded", False)
        assert "deadline_seconds, 0.5" in failed.error.message
        assert running.files_of(late) == []
        assert running.wait_for_job(running.submit("finish")).status == "completed"


def test_a_preview_lasts_as_long_as_its_attempt(supervised: Start) -> None:
    with supervised() as running:
        job_id = running.submit("denoise preview step until:a finish")
        running.wait_for(lambda: running.job(job_id).step == 1)
        assert running.job(job_id).preview_step == 1
        assert running.files.preview(job_id).read_bytes() == JPEG
        running.let("a")
        running.wait_for_job(job_id)
        assert running.files_of(job_id) == ["1.mp4", "1.thumbnail.jpg"]


def test_a_drain_waits_for_both_and_keeps_checkpoints(supervised: Start) -> None:
    with supervised() as running:
        writing = running.submit("denoise release until:a finish")
        computing = running.submit("denoise step preview checkpoint")
        running.wait_for(lambda: running.job(computing).checkpoint_step == 1)
        running.submit("finish")
        running.let("a")
        running.drain(1.0)
        assert running.job(writing).status == "completed"
        assert (running.job(computing).status, running.job(computing).losses) == ("queued", 0)
        assert running.files_of(computing) == ["checkpoint.safetensors"]
        assert running.job(computing).checkpoint_step == 1
    (running.files.videos / computing / "1.mp4").write_bytes(b"what a killed worker left")
    running.files.prepare(writing, 7)
    running.files.checkpoint(writing).write_bytes(b"of a completed job")
    with supervised() as again:
        again.wait_for(lambda: again.job(computing).attempt == 2)
        assert again.files_of(writing) == ["1.mp4", "1.thumbnail.jpg"]
        assert "1.mp4" not in again.files_of(computing)
        assert "checkpoint.safetensors" in again.files_of(computing)


def test_a_frozen_worker_is_replaced(supervised: Start) -> None:
    with supervised(worker_timeout_seconds=5) as running:
        frozen = running.submit("denoise checkpoint freeze")
        running.wait_for(lambda: running.job(frozen).losses == 1)
        running.jobs.cancel(frozen)
        running.wake()
        assert running.wait_for_job(running.submit("finish")).status == "completed"


def test_a_worker_with_a_broken_device_ends_when_its_jobs_have(supervised: Start) -> None:
    with supervised() as running:
        before = running.worker_pid()
        writing = running.submit("denoise release until:a finish")
        running.wait_for(lambda: running.job(writing).stage == "denoise")
        breaking = running.submit("denoise break")
        after = running.submit("finish")
        assert code_of(running.wait_for_job(breaking)) == "internal"
        time.sleep(0.2)
        assert running.job(after).status == "queued"
        running.let("a")
        assert running.wait_for_job(writing).attempt == 1
        done = running.wait_for_job(after)
        assert (done.status, done.attempt, done.losses) == ("completed", 1, 0)
        assert running.worker_pid() != before


@pytest.mark.parametrize("days", [-1, 1])
def test_a_clock_that_jumps_ends_and_restarts_nothing(
    supervised: Start, days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with supervised() as running:
        job_id = running.submit("denoise step until:a step finish", deadline_seconds=100.0)
        running.wait_for(lambda: running.job(job_id).step == 1)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + days * 86400)
        running.wake()
        time.sleep(0.3)
        assert running.job(job_id).status == "in_progress"
        running.let("a")
        done = running.wait_for_job(job_id)
        assert (done.status, done.attempt) == ("completed", 1)
        assert running.wait_for_job(running.submit("finish")).status == "completed"


def test_expired_jobs_go_with_their_files(supervised: Start) -> None:
    with supervised(retention_seconds=0.5) as running:
        job_id = running.submit("until:a finish")
        running.let("a")
        folder = running.files.videos / job_id
        running.wait_for(folder.is_dir)
        running.wait_for(lambda: running.jobs.find(job_id) is None)
        running.wait_for(lambda: not folder.exists())
        assert running.jobs.expired(time.time() + 1000) == []
