"""SIGKILL of a real worker in each stage: the job goes on where its checkpoint is, to the same file."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from configs.job import CheckpointSaved, JobEvent, StageStarted
from configs.model_preset import ModelPreset
from server.job import Job
from server.protocol import JobMessage, JobProgressed
from server.running_job import RunningJob
from tests.server.running_supervisor import RunningSupervisor

PROMPT = "a red circle"
STEPS = 4  # of the sample job


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, preset: ModelPreset) -> Iterator[RunningSupervisor]:
    """A supervisor with a worker that has the tiny model."""
    folder: Path = tmp_path_factory.mktemp("deaths") / "data"
    with RunningSupervisor(folder, preset) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(running: RunningSupervisor) -> Job:
    """The job as it ends when nothing happens."""
    return running.wait_for_job(running.submit(PROMPT))


def stage(name: str) -> Callable[[JobEvent], bool]:
    """Whether an event is the start of that stage."""
    return lambda event: isinstance(event, StageStarted) and event.stage == name


def checkpoint_of(step: int) -> Callable[[JobEvent], bool]:
    """Whether an event is that checkpoint."""
    return lambda event: isinstance(event, CheckpointSaved) and event.step == step


@pytest.mark.parametrize(
    ("moment", "checkpoint_every", "resumed_from"),
    [
        (stage("text_encode"), 0, None),
        (checkpoint_of(2), 2, 2),
        (stage("vae_decode"), 0, STEPS),
        (stage("encode_mp4"), 0, STEPS),
    ],
    ids=["text_encode", "denoise", "vae_decode", "encode_mp4"],
)
def test_a_killed_workers_job_ends_as_if_nothing_had_happened(
    running: RunningSupervisor,
    undisturbed: Job,
    monkeypatch: pytest.MonkeyPatch,
    moment: Callable[[JobEvent], bool],
    checkpoint_every: int,
    resumed_from: int | None,
) -> None:
    handle = RunningJob.handle

    def handle_and_kill(job: RunningJob, message: JobMessage) -> None:
        if job.claim.attempt == 1 and isinstance(message, JobProgressed) and moment(message.event):
            os.kill(running.worker_pid(), signal.SIGKILL)
        handle(job, message)

    monkeypatch.setattr(RunningJob, "handle", handle_and_kill)
    after = running.submit("a green square")
    job = running.wait_for_job(running.submit(PROMPT, checkpoint_every=checkpoint_every, priority=1))
    assert (job.status, job.attempt, job.losses) == ("completed", 2, 1)
    assert job.result is not None
    assert undisturbed.result is not None
    assert job.result.resumed_from_step == resumed_from
    assert job.steps_run == STEPS - (resumed_from or 0)
    if not checkpoint_every:  # else the manifests in the files differ by it
        assert job.result.file == undisturbed.result.file
    assert job.result.thumbnail == undisturbed.result.thumbnail
    # The row is written first: other files go a moment later.
    running.wait_for(lambda: running.files_of(job.id) == ["2.mp4", "2.spritesheet.jpg", "2.thumbnail.jpg"])
    assert running.wait_for_job(after).status == "completed"
