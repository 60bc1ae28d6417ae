"""A server whose jobs run on two ranks (gloo, on the CPU): as on one, cancelled, and when a rank is hurt."""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from configs.job import JobParameters, JobPaths
from configs.model_preset import find_model
from pipelines import LoadedPipeline, load_pipeline, run_job
from tests.faults import processes
from tests.pipelines.clips import decoded_frames
from tests.server.running_server import RunningServer

# Parts of the server are killed, and each start of it loads PyTorch twice.
pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]
MODEL = "reelwright-shapes"
SIDE = 64
CLIP = {
    "prompt": "a red circle moving left quickly on a white background",
    "size": f"{SIDE}x{SIDE}",
    "num_frames": 9,
    "num_inference_steps": 4,
    "seed": 3,
    # One dense step, and blocks that do not end where the ranks' shares do.
    "attention": {"dense_steps": 1, "min_tokens": 0, "block_size": 50},
}
MANY_STEPS = CLIP | {"num_inference_steps": 24, "checkpoint_every": 1}


# Tensors are mapped each by itself, so that a limit on address space is met by the next one.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_ARENA_MAX": "1"}


class TwoRanks(RunningServer):
    """A server with ``--gpus 2``."""

    def ranks(self) -> tuple[int, int]:
        """The processes of rank 0 and rank 1."""
        worker = int(self.worker()["worker_pid"])
        (follower,) = [pid for pid in processes.children(worker) if "spawn_main" in processes.command(pid)]
        return worker, follower

    def frames(self, job: dict[str, Any], path: Path) -> NDArray[np.uint8]:
        """Those of a finished job's file."""
        path.write_bytes(self.client.get(f"/v1/videos/{job['id']}/content").content)
        return decoded_frames(path, SIDE, SIDE)

    def manifest(self, job: dict[str, Any]) -> dict[str, Any]:
        """What a finished job says of how it was made."""
        return dict(self.client.get(f"/v1/videos/{job['id']}/manifest").json())

    def finish(self, **fields: Any) -> dict[str, Any]:
        """Submit a job and wait for it."""
        job = self.wait_for_job(self.submit(**fields)["id"])
        assert job["status"] == "completed", job
        return job


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    """Ready; the tests hurt it, and it gets well."""
    folder = tmp_path_factory.mktemp("ranks")
    flags = ("--gpus", "2", "--worker-timeout-seconds", "10")
    with TwoRanks(folder / "data", MODEL, *flags, env=MAPPED) as running:
        yield running.wait_until_ready()


@pytest.fixture(scope="module")
def undisturbed(server: TwoRanks) -> dict[str, Any]:
    """The job of ``MANY_STEPS`` when nothing happens."""
    return server.finish(**MANY_STEPS)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[LoadedPipeline]:
    """The model in this process, on one thread as in the server."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_pipeline(find_model(MODEL), device="cpu", dtype="float32")
    torch.set_num_threads(threads)


def frames_alone(loaded: LoadedPipeline, manifest: dict[str, Any], path: Path) -> NDArray[np.uint8]:
    """Those of the same clip on one rank."""
    parameters = JobParameters.model_validate(manifest["parameters"])
    list(run_job(loaded, parameters, JobPaths(path), is_cancelled=lambda: False))
    return decoded_frames(path, SIDE, SIDE)


def test_ranks_that_take_a_pass_each_make_the_same_frames(
    server: TwoRanks, one_rank: LoadedPipeline, tmp_path: Path
) -> None:
    job = server.finish(**CLIP, guidance_scale=3.0, negative_prompt="a blue square")
    expected = frames_alone(one_rank, server.manifest(job), tmp_path / "alone.mp4")
    np.testing.assert_array_equal(server.frames(job, tmp_path / "ranks.mp4"), expected)
    parallel = job["attention"]["ran"]["parallel"]
    assert (parallel["guidance"], parallel["token_ranks"]) == ("split", 1)


def test_ranks_that_share_tokens_make_the_frames_of_one(
    server: TwoRanks, one_rank: LoadedPipeline, tmp_path: Path
) -> None:
    job = server.finish(**CLIP)
    manifest = server.manifest(job)
    expected = frames_alone(one_rank, manifest, tmp_path / "alone.mp4").astype(int)
    # Sums in another order may round one value in thousands to the next of 256 levels; the codec spreads it.
    assert np.abs(server.frames(job, tmp_path / "ranks.mp4") - expected).mean() < 0.05
    parallel = job["attention"]["ran"]["parallel"]
    assert manifest["attention"]["parallel"] == parallel
    assert manifest["environment"]["device"] == "cpu, 2 ranks"
    assert (parallel["ranks"], parallel["token_ranks"], parallel["guidance"]) == (2, 2, None)
    assert parallel["sparse_exchange"] == "anchors"
    assert 0 < parallel["sparse_call_bytes"] < parallel["dense_call_bytes"]


def test_memory_is_that_of_all_ranks(server: TwoRanks) -> None:
    metrics = server.finish(**CLIP)["metrics"]
    of_ranks = metrics["peak_memory_by_rank"]
    assert len(of_ranks) == 2
    assert metrics["peak_memory_bytes"] == max(of_ranks)
    assert server.worker()["gpus"] == 2
    in_use = [processes.resident_bytes(pid) for pid in server.ranks()]
    # Both are in it, so it is more than either; heartbeats bring it.
    server.wait_for(lambda: memory_in_use(server) > max(in_use) * 1.2)


def memory_in_use(server: TwoRanks) -> float:
    """The gauge of the CPU."""
    lines = server.client.get("/metrics").text.splitlines()
    name = 'reelwright_memory_in_use_bytes{device="cpu",worker="local"} '
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"step_cache": "first_block"}, "step_cache"),
        ({"attention": {"backend": "block_topk"}}, "attention.backend"),
    ],
    ids=["step_cache", "block_topk"],
)
def test_what_ranks_cannot_share_is_refused(server: TwoRanks, fields: dict[str, Any], param: str) -> None:
    answer = server.client.post("/v1/videos", json={"prompt": "a red circle"} | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert "where 2 GPUs share a clip's tokens" in answer.json()["error"]["message"]


def test_a_cancel_stops_all_ranks_at_a_step_and_they_go_on(server: TwoRanks) -> None:
    before = server.ranks()
    job_id = server.submit(num_inference_steps=100, size="128x128")["id"]
    server.wait_for_step(job_id)
    server.client.post(f"/v1/videos/{job_id}/cancel")
    job = server.wait_for_job(job_id)
    assert job["status"] == "cancelled"
    assert job["step"] < job["total_steps"]
    server.finish(**CLIP)
    assert server.ranks() == before


def kill_follower(ranks: tuple[int, int]) -> None:
    processes.kill(ranks[1])


def kill_rank_0(ranks: tuple[int, int]) -> None:
    processes.kill(ranks[0])


def stop_follower(ranks: tuple[int, int]) -> None:
    os.kill(ranks[1], signal.SIGSTOP)


@pytest.mark.parametrize(
    ("hurt", "told"),
    [
        (kill_follower, "rank 1 died"),
        (kill_rank_0, "killed by SIGKILL"),
        (stop_follower, "rank 1 gave no sign of life for 1"),  # 10 seconds, or a few more
    ],
)
def test_all_ranks_end_with_one_and_others_go_on(
    server: TwoRanks,
    undisturbed: dict[str, Any],
    hurt: Callable[[tuple[int, int]], None],
    told: str,
) -> None:
    before = server.ranks()
    job_id = server.submit(**MANY_STEPS)["id"]
    server.wait_for(lambda: server.job(job_id)["checkpoint_step"] >= 2)
    hurt(before)
    job = server.wait_for_job(job_id)
    assert (job["status"], job["attempt"]) == ("completed", 2)
    assert job["resumed_from_step"] >= 2
    assert job["thumbnail"] == undisturbed["thumbnail"]
    assert told in server.log.read_text()
    assert all(processes.is_dead(pid) for pid in before)
    assert not set(before) & set(server.ranks())


def test_an_error_of_a_rank_in_a_step_fails_the_job_and_starts_all_anew(server: TwoRanks) -> None:
    before = server.ranks()
    job_id = server.submit(num_inference_steps=100, size="128x128", num_frames=17)["id"]
    server.wait_for_step(job_id, 1)
    half = processes.address_space_bytes(before[1]) // 2
    with processes.limited(before[1], resource.RLIMIT_AS, half):
        job = server.wait_for_job(job_id)
    assert (job["status"], job["attempt"]) == ("failed", 1)
    assert job["error"]["code"] == "out_of_memory"
    assert job["error"]["message"].startswith("rank 1: out of memory in denoise for ")
    server.wait_for(lambda: server.worker()["worker_pid"] not in (None, before[0]))
    processes.wait_until(lambda: all(map(processes.is_dead, before)), "both ranks have ended")
