"""SIGKILL of the worker in every stage: the job goes on where its checkpoint is, to the same file."""

from typing import Any

import pytest

from tests.faults import processes
from tests.faults.faulty_server import LONG, SMALL, Ending, FaultyServer
from tests.faults.writing import ENCODED, catch_writing

pytestmark = pytest.mark.alone

ONCE_LOST = Ending(attempt=2, losses=1)
# As long as the API takes it, twice: the tokenizer needs some time for that.
LONG_TEXT = {"prompt": "a red circle " * 750, "negative_prompt": "a blue square " * 700, "guidance_scale": 2}
RESUMED = SMALL | {"num_inference_steps": 6, "checkpoint_every": 1, "seed": 7}
LAST_STEP = 6


def in_stage(server: FaultyServer, job_id: str, stage: str) -> bool:
    """Whether the table says so."""
    return server.row(job_id).stage == stage


@pytest.fixture(scope="module")
def undisturbed(server: FaultyServer) -> tuple[dict[str, Any], bytes]:
    """The job of ``RESUMED`` and its file, when nothing happens."""
    job = server.finish(server.start(**RESUMED))
    return job, server.video(job["id"])


def test_in_load(server: FaultyServer) -> None:
    job_id = server.start(**LONG)
    processes.wait_until(lambda: server.row(job_id).step >= 2, "the job denoises")
    server.expect(job_id, ONCE_LOST)
    first = server.worker_pid
    processes.kill(first)
    server.wait_for(lambda: server.worker()["worker_pid"] not in (None, first))
    # Imports alone take seconds: the new one is in the midst of them.
    assert server.worker()["state"] == "restarting"
    assert server.row(job_id).status == "queued"
    processes.kill(server.worker_pid)
    server.finish(job_id)
    server.check_sound()


def test_in_text_encode(server: FaultyServer) -> None:
    worker = server.worker_pid
    processes.stop(worker)
    job_id = server.start(**LONG_TEXT)
    server.expect(job_id, ONCE_LOST)
    processes.wait_until(lambda: server.row(job_id).status == "in_progress", "the job is claimed")
    server.run_worker_until(lambda: in_stage(server, job_id, "text_encode"), "the text is encoded")
    processes.kill(worker)
    assert server.finish(job_id)["resumed_from_step"] is None
    server.check_sound()


@pytest.mark.parametrize(
    ("step", "stage"),
    [(1, "denoise"), (3, "denoise"), (LAST_STEP, "vae_decode")],
    ids=lambda value: str(value),
)
def test_after_a_checkpoint(
    server: FaultyServer, undisturbed: tuple[dict[str, Any], bytes], step: int, stage: str
) -> None:
    job_id = server.start(**RESUMED)
    server.expect(job_id, ONCE_LOST)

    def is_there() -> bool:
        row = server.row(job_id)
        return (row.checkpoint_step, row.stage) == (step, stage)

    processes.kill(server.run_worker_until(is_there, f"the checkpoint of step {step} is saved"))
    job = server.finish(job_id)
    assert job["resumed_from_step"] == step
    assert server.video(job_id) == undisturbed[1]  # every byte, so every frame
    assert job["thumbnail"] == undisturbed[0]["thumbnail"]
    assert job["warnings"] == []
    server.check_sound()


def test_in_store_when_the_supervisor_has_not_heard_of_the_end(server: FaultyServer) -> None:
    server.finish(server.start())  # with all the threads that the first job starts
    idle_threads = processes.threads(server.worker_pid)
    job_id = server.start(**ENCODED)
    worker, _ = catch_writing(server, job_id)
    supervisor = server.supervisor_pid
    processes.stop(supervisor)
    processes.go_on(worker)
    processes.wait_until(
        lambda: server.files.video(job_id, 1).exists() and processes.threads(worker) == idle_threads,
        "the worker is done",
    )
    assert server.row(job_id).status == "in_progress"
    processes.kill(worker)
    processes.go_on(supervisor)
    server.finish(job_id)  # at once: what the worker said before its death counts
    server.check_sound()  # the next job is not handed to the dead one


def test_in_encode_mp4_of_one_job_and_denoise_of_the_next(server: FaultyServer) -> None:
    first = server.start(**ENCODED)
    second = server.start(**LONG)
    worker, ffmpeg = catch_writing(server, first)
    processes.stop(ffmpeg)
    processes.go_on(worker)
    processes.wait_until(lambda: server.row(second).step >= 2, "the second job denoises")
    assert in_stage(server, first, "encode_mp4")
    for job_id in (first, second):
        server.expect(job_id, ONCE_LOST)
    processes.kill(worker)
    processes.go_on(ffmpeg)
    assert server.finish(first)["resumed_from_step"] == SMALL["num_inference_steps"]
    server.finish(second)
    server.check_sound()
