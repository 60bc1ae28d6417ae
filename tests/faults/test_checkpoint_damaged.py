"""Checkpoints that are of no use when the server starts again: the jobs begin anew and say so."""

import itertools

import pytest

from tests.faults import processes
from tests.faults.faulty_server import SMALL, Ending, FaultyServer

pytestmark = pytest.mark.alone

RESUMED = SMALL | {"num_inference_steps": 20, "checkpoint_every": 1}


def test_cut_short_foreign_and_no_checkpoint_at_all(server: FaultyServer) -> None:
    running = server.start(**RESUMED)
    queued = [server.start(seed=seed) for seed in (2, 3, 4)]
    processes.wait_until(lambda: server.row(running).checkpoint_step >= 5, "a checkpoint is saved")
    server.kill_everything()
    cut = server.files.checkpoint(running)
    good = cut.read_bytes()
    cut.write_bytes(good[: len(good) // 2])
    flipped = bytearray(good)
    flipped[-1] ^= 1
    for job_id, content in zip(queued, (good, bytes(flipped), b"no checkpoint"), strict=True):
        path = server.files.checkpoint(job_id)
        path.parent.mkdir()
        path.write_bytes(content)
    server.expect(running, Ending(attempt=2, losses=1))
    server.restart()
    reasons = ("it cannot be read", "it is another job's", "its checksum is wrong", "it cannot be read")
    for job_id, reason in zip(itertools.chain([running], queued), reasons, strict=True):
        job = server.finish(job_id)
        assert job["resumed_from_step"] is None
        (warning,) = job["warnings"]
        assert warning.startswith("the checkpoint was not used, the job began at step 1: ")
        assert reason in warning
    server.check_sound()
