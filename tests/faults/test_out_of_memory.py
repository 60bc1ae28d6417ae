"""The worker's allocator fails: a limit on its address space, set in the midst of a job, makes it.

On a GPU: test_out_of_memory_gpu.py.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.faults import processes
from tests.faults.faulty_server import Ending, FaultyServer

pytestmark = pytest.mark.alone

MIB = 2**20
OUT_OF_MEMORY = Ending(status="failed", code="out_of_memory")
# Larger than one small tile, so that there is a rung below the whole picture.
PICTURE = {"size": "256x256", "num_inference_steps": 1}
MANY_TOKENS = PICTURE | {"num_frames": 33}  # or the denoise finds room in what small tensors left
# What is freed goes back to the system, so that a limit means the same whatever ran before.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(MIB), "MALLOC_ARENA_MAX": "1"}
TILES_FIT_BYTES = 120 * MIB
NOTHING_FITS_BYTES = 16 * MIB
LEAST_LEAK_BYTES = 16 * MIB  # less than the tensors of a job that fails


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    """A server whose worker has made such a picture."""
    with FaultyServer(tmp_path_factory.mktemp("faults") / "data", env=GIVE_BACK) as running:
        assert running.finish(running.start(**PICTURE))["decode"] == {
            "rung": "whole",
            "failed": [],
            "fused": False,
        }
        yield running


def run_short_of_memory(
    server: FaultyServer, fields: dict[str, Any], stage: str, more_bytes: int
) -> dict[str, Any]:
    """From the beginning of a stage on, the worker can map only so much more than it has."""
    worker = server.worker_pid
    job_id = server.start(**fields)
    processes.wait_until(lambda: server.row(job_id).stage == stage, f"{stage} begins")
    processes.stop(worker)
    limit = processes.address_space_bytes(worker) + more_bytes
    with processes.limited(worker, resource.RLIMIT_AS, limit):
        processes.go_on(worker)
        job = server.wait_for_job(job_id)
    if job["status"] == "failed":
        server.expect(job_id, OUT_OF_MEMORY)
    return server.finish(job_id)


@contextmanager
def recovering(server: FaultyServer) -> Iterator[None]:
    """After the block it is the same worker, and can make a whole picture."""
    worker = server.worker_pid
    yield
    assert server.worker_pid == worker
    again = server.finish(server.start(**PICTURE))
    assert again["decode"] == {"rung": "whole", "failed": [], "fused": False}
    server.check_sound()


def test_decode_goes_on_with_tiles(server: FaultyServer) -> None:
    with recovering(server):
        job = run_short_of_memory(server, PICTURE, "vae_decode", TILES_FIT_BYTES)
        assert job["status"] == "completed"
        assert job["decode"] == {"rung": "small_tiles", "failed": ["whole"], "fused": False}


@pytest.mark.parametrize(("stage", "fields"), [("denoise", MANY_TOKENS), ("vae_decode", PICTURE)])
def test_job_fails_where_nothing_fits(server: FaultyServer, stage: str, fields: dict[str, Any]) -> None:
    worker = server.worker_pid
    held = []
    with recovering(server):
        for _ in range(3):
            job = run_short_of_memory(server, fields, stage, NOTHING_FITS_BYTES)
            assert job["status"] == "failed"
            assert job["error"]["message"].startswith(f"out of memory in {stage} for ")
            held.append(processes.resident_bytes(worker))
        assert held[-1] < held[0] + LEAST_LEAK_BYTES  # what the failed job had is free again
